#!/usr/bin/env bash
# A student with a laptop and an afternoon: from text files to a small MoE model that has learned something, the report of
# the run as a page, and the weights in the form that transformers reads. No GPU; two cores are enough.
set -euo pipefail

# Any text will do. Python's own sources are on every computer that has moefold.
text=$(python -c "import email, os; print(os.path.dirname(email.__file__))")
moefold tokenize "$text" --out data/mine

# A file to edit, which inherits from a recipe; what is wrong with it is said before anything starts.
moefold init debug_small > run.yaml
moefold check run.yaml --data.train data/mine --data.validation null > check.txt

# The same command again would go on where this one stopped.
moefold train run.yaml --name first --data.train data/mine --data.validation null --train.steps 60
moefold report runs/first
moefold convert to-hf runs/first exported

python - <<'CHECK'
import json
from pathlib import Path

lines = [json.loads(line) for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]
losses = [line["loss"] for line in lines if line["kind"] == "step"]
assert losses[-1] < 0.75 * losses[0], losses
assert "<svg" in next(Path("runs/first").glob("*.html")).read_text()
assert Path("exported/config.json").is_file() and list(Path("exported").glob("*.safetensors"))
print(f"the loss fell from {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} logged steps")
CHECK
echo "student: done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
