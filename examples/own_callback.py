"""Train in a script, with an own callback: metrics, a checkpoint at the best validation loss, and an early stop."""

# %% A run: a recipe, with a few keys changed. It trains on a builtin corpus of bytes.
import json
import sys
import tempfile
from pathlib import Path

import moefold

directory = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="moefold-example-")
run = moefold.load_run(
    "debug_tiny",
    {
        "name": "own_callback",
        "train.steps": 150,
        "train.directory": directory,
        "train.log_every": 10,
        "train.validate_every": 8,
        "train.saving.every": 0,
        "optim.lr": 0.003,
    },
)
assert moefold.check(run) == []


# %% The callback. Hooks that do not interest it are left out.
class RouterWatch(moefold.Callback):
    """Logs how much of the gradient is the routers', and stops when the loss has come down far enough."""

    def __init__(self, target: float) -> None:
        self.target, self.best, self.saved = target, float("inf"), []

    def after_backward(self, gradients, control) -> None:
        # On every rank, before clipping and the update. With several ranks these are shards, and a norm of the whole
        # model would have to be summed over them; here the one process holds everything.
        squares = {name: float(gradient.square().sum()) for name, gradient in gradients.items()}
        routers = sum(square for name, square in squares.items() if ".router." in name)
        control.log("router_grad_share", routers / sum(squares.values()))

    def after_step(self, record, control) -> None:
        # On rank 0. What is logged until the end of this hook belongs to this step's record.
        control.log("tokens_of_busiest_expert", max(map(max, record.counts)))
        if record.loss < self.target:
            control.request_stop(f"the loss is below {self.target}")

    def on_evaluate(self, evaluation, control) -> None:
        if evaluation.loss < self.best:
            self.best = evaluation.loss
            control.request_save()

    def on_save(self, step, path) -> None:
        self.saved.append(step)


# %% Train. Console lines and metrics.jsonl are callbacks too, and show the metrics that ours adds.
watch = RouterWatch(target=2.9)
outcome = moefold.Trainer(run, callbacks=[watch]).fit()
print(f"outcome: {outcome}; validation loss {watch.best:.3f}; checkpoints at steps {watch.saved}")

# %% Everything is in metrics.jsonl: one JSON object per line.
lines = [json.loads(line) for line in (Path(directory) / run.name / "metrics.jsonl").read_text().splitlines()]
steps = [line for line in lines if line["kind"] == "step"]
for line in steps[:: max(1, len(steps) // 5)]:
    share = line["metrics"]["router_grad_share"]
    print(f"step {line['step']:3d}  loss {line['loss']:.3f}  routers' share of the gradient {share:.2%}")
assert outcome == "stopped" and steps[-1]["loss"] < watch.target

# %% The same run again, for longer: it resumes from its checkpoint, with the next step.
again = moefold.load_run(run, {"train.steps": steps[-1]["step"] + 5})
moefold.Trainer(again, reporters=[], callbacks=[watch := RouterWatch(target=0.0)]).fit()
assert watch.saved == [steps[-1]["step"] + 5]
# On several CPU processes: moefold.Trainer(run, nproc=2). On GPUs: start this script with torchrun.
