#!/usr/bin/env bash
# A lead who plans DeepSeek-V3 on 2,048 H100 for 14.8T tokens: how many days, which layout, what limits it, and what the
# machine that was offered instead would change. Nothing here needs torch.
set -euo pipefail

moefold plan deepseek_v3 --gpu H100 --gpus 2048 --tokens 14.8T --html plan.html --json > plan.json

# The layout that comes with the recipe, its groups over NVLink domains, and its pipeline schedule.
moefold check deepseek_v3@h100x2048 --world 2048 --data.train tokens --json > check.json
moefold layout --world 2048 --pp 8 --ep 32 --domain 8 > layout.txt
moefold schedule interleaved_overlapped --stages 8 --virtual 4 --microbatches 32 > schedule.txt

# The same budget on a quarter as many GB200.
moefold plan deepseek_v3 --gpu GB200 --gpus 512 --tokens 14.8T --json > offered.json

python - <<'CHECK'
import json
from pathlib import Path

plan, offered = (json.loads(Path(name).read_text()) for name in ("plan.json", "offered.json"))
for found in (plan, offered):
    chosen = found["chosen"]
    assert chosen["fits"] and chosen["memory_bytes"] <= 0.95 * chosen["capacity_bytes"]
    assert found["goodput"]["tokens"] == 14.8e12 and 10 < found["goodput"]["days"] < 400
assert "--nnodes 256" in plan["command"] and "$DATA" in plan["command"]
assert json.loads(Path("check.json").read_text())["problems"] == []
assert "<svg" in Path("plan.html").read_text()
for name, found in (("2,048 H100", plan), ("512 GB200", offered)):
    print(f"{name}: {found['goodput']['days']:.0f} days, {found['chosen']['wall']} limits the step")
CHECK
echo "lead: done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
