"""Tasks of lm-evaluation-harness on a trained model: its three requests, answered by `model/scoring.py` and generation.

The harness is an optional package, so the class that it wants as a base is made when tasks are evaluated. Tasks whose
files are in a folder of the user's need no network if their data is local (`dataset_path: json` and `data_files`). The
harness puts a space before every answer unless a task says `target_delimiter: ""`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from moefold.errors import DataError
from moefold.model.generation import Sampling, generate
from moefold.model.scoring import score, windows
from moefold.ops.engines import load_engine

if TYPE_CHECKING:
    from moefold.checkpoint.trained_model import TrainedModel
    from moefold.data.text_codec import TextCodec

# Metrics by task.
Metrics = dict[str, dict[str, object]]
_BATCH = 8
_MAX_NEW = 256
# What the harness asks: (its own key, tokens before, tokens to score).
_Tokens = tuple[object, list[int], list[int]]


class _Request(Protocol):
    args: tuple[object, ...]


def evaluate_tasks(
    model: TrainedModel,
    codec: TextCodec,
    tasks: Sequence[str],
    task_dir: str | None,
    limit: int | None,
    context: int,
) -> Metrics:
    """The metrics of each task, as the harness computes them."""
    harness = load_engine("lm_eval")
    manager = _task_manager(tasks, task_dir)
    with torch.no_grad():
        found = harness.simple_evaluate(
            model=adapter(model, codec, context),
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            bootstrap_iters=0,
        )
    return {str(task): dict(metrics) for task, metrics in found["results"].items()}


def _task_manager(tasks: Sequence[str], task_dir: str | None) -> object:
    load_engine("lm_eval")
    from lm_eval.tasks import TaskManager

    if task_dir is not None and not Path(task_dir).is_dir():
        raise DataError(f"--task-dir {task_dir}: there is no such folder; give one with the tasks' YAML files")
    manager = None
    # The harness' own thousands of tasks are read only if one is asked for.
    for defaults in (False, True) if task_dir is not None else (True,):
        manager = TaskManager(include_path=task_dir, include_defaults=defaults)
        unknown = [task for task in tasks if task not in manager.all_tasks]
        if not unknown:
            return manager
    assert manager is not None
    where = (
        f"in {task_dir} or in lm-evaluation-harness" if task_dir else "in lm-evaluation-harness; --task-dir adds some"
    )
    raise DataError(f"--tasks: no task {', '.join(map(repr, unknown))} {where}")


def adapter(model: TrainedModel, codec: TextCodec, context: int) -> object:
    """An `lm_eval.api.model.TemplateLM` of this model."""
    load_engine("lm_eval")
    from lm_eval.api.model import TemplateLM

    class MoefoldLM(TemplateLM):  # type: ignore[misc]
        tokenizer_name = "moefold"

        @property
        def eot_token_id(self) -> int:
            """What the harness puts before a text that has nothing before it."""
            return min(codec.stop | model.stop, default=0)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: object) -> list[int]:
            return codec.encode(string)

        def _loglikelihood_tokens(self, requests: Sequence[_Tokens], **options: object) -> list[tuple[float, bool]]:
            found: list[tuple[float, bool]] = []
            for begin in range(0, len(requests), _BATCH):
                several = requests[begin : begin + _BATCH]
                # The end of what is too long: the continuation must be whole.
                texts = [[*before, *after][-(context + 1) :] for _, before, after in several]
                firsts = [len(text) - len(after) for text, (_, _, after) in zip(texts, several)]
                for first, (_, _, after) in zip(firsts, several):
                    if first < 1:
                        raise DataError(f"an answer has {len(after):,} tokens, more than --context {context:,}")
                found += [
                    (float(one.logprobs.double().sum()), bool(one.likeliest.all()))
                    for one in score(model.decoder, texts, firsts)
                ]
            return found

        def loglikelihood_rolling(self, requests: Sequence[_Request], disable_tqdm: bool = False) -> list[float]:
            return [self._rolling([self.eot_token_id, *codec.encode(str(request.args[0]))]) for request in requests]

        def _rolling(self, tokens: list[int]) -> float:
            cut = list(windows(len(tokens), context, context))
            texts = [tokens[window.start : window.end] for window in cut]
            scored = score(model.decoder, texts, [window.first - window.start for window in cut]) if cut else []
            return sum(float(one.logprobs.double().sum()) for one in scored)

        def generate_until(self, requests: Sequence[_Request], disable_tqdm: bool = False) -> list[str]:
            return [self._until(*request.args) for request in requests]  # type: ignore[arg-type]

        def _until(self, text: str, options: Mapping[str, str]) -> str:
            until: str | Sequence[str] = options.get("until") or ()
            words = (until,) if isinstance(until, str) else tuple(until)
            asked = float(options.get("temperature", 0.0) or 0.0) if options.get("do_sample") else 0.0
            sampling = Sampling(asked, int(options.get("top_k", 0)), float(options.get("top_p", 1.0)))
            new = int(options.get("max_gen_toks", _MAX_NEW))
            prompt = (codec.encode(text) or [self.eot_token_id])[-max(context - new, 1) :]
            stop = codec.stop | model.stop
            (found,) = generate(model.decoder, model.cache, [prompt], new, sampling, stop)
            said = codec.decode(found.tokens)
            return said[: min((at for word in words if (at := said.find(word)) >= 0), default=len(said))]

    return MoefoldLM()
