#!/usr/bin/env bash
# An engineer with one node of eight H100 who is to train a model of Qwen3-30B-A3B's shape: which layout, does it fit, is it
# right, and does a run survive a restart. Everything before the launch is done here, on a computer without GPUs.
set -euo pipefail

# The best layout for this node, and the command that starts it.
moefold plan qwen3_30b_a3b --gpu H100 --gpus 8 --json > plan.json
python - > launch.txt <<'LAUNCH'
import json, shlex

plan = json.load(open("plan.json"))
words = shlex.split(plan["command"])
filled = {"$DATA": "tokens", "$STEPS": "1000", "$LR": "1e-4"}
print(shlex.join(filled.get(word, word) for word in words[words.index("train") + 1 :]))
LAUNCH

# The launch, with placeholders filled in, has no problem on eight ranks.
xargs moefold check --world 8 < launch.txt > check.txt

# The same kind of layout on a small model of this shape: four processes compute what one computes.
moefold prove qwen3_30b_a3b_proxy --world 4 --parallel.ep 4 --json > proof.json

# One rank's step on a fake GPU: devices, streams and collectives are watched.
moefold dryrun qwen3_30b_a3b_proxy --world 4 --parallel.ep 4 --precision.compute bfloat16 --device cuda | tee dryrun.txt

# A rehearsal with four CPU ranks that stops after ten steps and goes on with two ranks in another layout.
small="--data.train builtin --data.validation null --optim.lr 1e-3 --name rehearsal"
moefold train qwen3_30b_a3b_proxy $small --nproc 4 --parallel.ep 4 --train.steps 10
moefold train qwen3_30b_a3b_proxy $small --nproc 2 --parallel.ep 2 --train.steps 16

python - <<'CHECK'
import json
from pathlib import Path

plan = json.load(open("plan.json"))
chosen = plan["chosen"]
assert chosen["fits"] and chosen["memory_bytes"] <= 0.95 * chosen["capacity_bytes"], "less than 5 % would be left"
assert "no problems" in Path("check.txt").read_text()
assert json.load(open("proof.json"))["holds"]
assert "0 findings on fake GPUs" in Path("dryrun.txt").read_text()
lines = [json.loads(line) for line in Path("runs/rehearsal/metrics.jsonl").read_text().splitlines()]
starts = [line for line in lines if line["kind"] == "start"]
steps = [line["step"] for line in lines if line["kind"] == "step"]
assert [start["world"] for start in starts] == [4, 2] and starts[1]["step"] == 10 and steps[-1] == 16, starts
print(f"predicted: {chosen['step_seconds']:.1f} s per step, {chosen['memory_bytes'] / 2**30:.1f} GiB; resumed at step 10")
CHECK
echo "node engineer: done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
