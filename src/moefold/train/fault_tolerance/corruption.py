"""Silent corruption: replicas compare hashes of their state, and a rank compares its own before and after a step.

A comparison is due every ``train.corruption.every`` steps, before every checkpoint and copy in memory, and after a step
that was skipped.

    after the update     every rank hashes what it holds (`state_hash.py`). Tensors with the same replicas are combined
                         into one number, and one all-gather of a few numbers per rank compares them. Replicas that
                         differ name the tensor and its ranks in a second exchange. The hash of all ranks' states is the
                         step's `state_hash` in `metrics.jsonl`.
    before the next      nothing may have changed since: every rank hashes again and compares with its own numbers. This
    update               finds changes of memory in tensors without replicas too, in the one step after a comparison.

Who is wrong: a rank whose own numbers changed; else those that a majority contradicts; else, between two replicas,
training again from the last checkpoint decides: at the same step the right one has the hash that comes out again.

What this cannot find: an error of computation before gradients are summed is the same on all replicas; a shard without
replicas that changes in a step which no comparison guards, or in the update itself. `every: 1` guards every step.

A finding is the same on all ranks, and all of them raise it. The loop then stops, goes back to a checkpoint, or has the
ranks excluded that are wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from moefold.checkpoint.load import from_rank_0, load_into
from moefold.checkpoint.step_dirs import committed_steps, final_path
from moefold.comm.collectives import all_gather_no_grad, all_reduce_ints, all_reduce_max, device_of
from moefold.comm.process_groups import Group
from moefold.errors import CorruptionError, ExclusionError, name_ranks
from moefold.optim.optimizer import ModelOptimizer
from moefold.parallel.parallelize import LocalModel
from moefold.private_files import open_own
from moefold.train.callback import Callback
from moefold.train.fault_tolerance.signals import print_stderr
from moefold.train.fault_tolerance.state_hash import BitHash, Held, gathered_weights, hashes_of, held_state
from moefold.train.state import TrainState
from moefold.train.train_context import TrainContext, position_of

FILE_NAME = "corruption.jsonl"
# Findings that name a tensor; more are counted.
MAX_NAMED = 8
_NAME_BYTES = 256


@dataclass(frozen=True)
class Finding:
    """One tensor that is not what it should be. ``hashes`` are by rank; ``culprits`` is empty where nothing decides."""

    step: int
    what: str
    tensor: str
    hashes: dict[int, str]
    culprits: tuple[int, ...]
    decided_by: str

    def __str__(self) -> str:
        who = (
            f"wrong on {name_ranks(self.culprits)}, by {self.decided_by}"
            if self.culprits
            else "no majority says which is wrong; training the step again does"
        )
        return f"{self.tensor} {self.what} ({name_ranks(self.hashes)}): {who}"


class _Row(NamedTuple):
    """What is compared: ``key`` is the same on all ranks that must have the same ``value``."""

    key: int
    value: int


@dataclass
class StateWatch:
    """One rank's side of the comparisons."""

    local_model: LocalModel
    optimizer: ModelOptimizer
    # Steps between comparisons; 0: none.
    every: int
    directory: Path
    hash_bits: BitHash = field(init=False)
    # Findings without a culprit, by step; training that step again decides.
    undecided: list[Finding] = field(default_factory=list)
    # Those for which it did.
    decided: list[Finding] = field(default_factory=list)
    # By step: the hash of all ranks' states, of the steps that were compared since the start.
    digests: dict[int, str] = field(default_factory=dict)
    _baseline: tuple[int, list[str], list[int]] | None = None

    def __post_init__(self) -> None:
        self.hash_bits = BitHash(self.local_model.device)

    @property
    def world(self) -> Group:
        return self.local_model.groups["world"]

    def is_due(self, step: int, saves: bool, skipped: bool) -> bool:
        """The same on all ranks."""
        again = any(finding.step == step for finding in self.undecided)
        return self.every > 0 and (step % self.every == 0 or saves or skipped or again)

    def after_update(self, step: int) -> str:
        """Compare replicas; returns the hash of all ranks' states."""
        held = list(held_state(self.local_model, self.optimizer))
        hashes = hashes_of(held, self.hash_bits)
        digest = self.digests[step] = self._compare(step, held, hashes)
        self._baseline = (step, [each.name for each in held], hashes)
        self._decide(step, {each.name: value for each, value in zip(held, hashes, strict=True)})
        return digest

    def needs_comparison(self, step: int) -> bool:
        """Before a checkpoint that was not foreseen when the step ended."""
        return self.every > 0 and step not in self.digests

    def forget_after(self, step: int) -> None:
        """Later steps are taken again."""
        self.digests = {compared: digest for compared, digest in self.digests.items() if compared <= step}

    def agrees(self, step: int) -> bool:
        """Whether the state that was loaded is what it was when ``step`` was compared; True if it was not.

        The next step is framed.
        """
        held = list(held_state(self.local_model, self.optimizer))
        hashes = hashes_of(held, self.hash_bits)
        now = self._compare(step, held, hashes)
        self._baseline = (step, [each.name for each in held], hashes)
        return self.digests.get(step, now) == now

    def before_update(self, step: int, excused: bool = False) -> None:
        """In the step after a comparison: nothing changed since, and gathered weights are the same everywhere.

        ``excused``: a callback on this rank says that it changed something.
        """
        if self._baseline is None:
            return
        (compared_at, names, before), self._baseline = self._baseline, None
        held = list(held_state(self.local_model, self.optimizer))
        now = dict(zip((each.name for each in held), hashes_of(held, self.hash_bits), strict=True))
        changed = {name: now.get(name, 0) for name, old in zip(names, before, strict=True) if now.get(name) != old}
        changed = {} if excused else changed
        if sum(all_reduce_ints((len(changed),), self.world)):
            named, more = self._changed_anywhere(step, changed)
            raise self._found(step, named, more, newest_good=compared_at)
        whole = list(gathered_weights(self.local_model))
        if whole:
            self._compare(step, whole, hashes_of(whole, self.hash_bits))

    # ---- comparisons ----

    def _compare(self, step: int, held: Sequence[Held], hashes: Sequence[int]) -> str:
        by_replicas: dict[tuple[int, ...], list[int]] = {}
        for each, value in zip(held, hashes, strict=True):
            by_replicas.setdefault(each.ranks, []).append(value)
        everything = _Row(_key("rank", self.world.index), self._combined(hashes))
        classes = [_Row(_key(ranks), self._combined(values)) for ranks, values in sorted(by_replicas.items())]
        table = self._gather([everything, *classes])
        if _differing(table):
            rows = [
                _Row(_key(each.ranks, each.name), value)
                for each, value in zip(held, hashes, strict=True)
                if len(each.ranks) > 1
            ]
            tables = self._gather(rows)
            names = {_key(each.ranks, each.name): each.name for each in held}
            named, more = self._differing_tensors(step, tables, names)
            raise self._found(step, named, more, newest_good=step - 1)
        return hashlib.sha256(json.dumps(table).encode()).hexdigest()[:16]

    def _combined(self, hashes: Sequence[int]) -> int:
        """Of many hashes one, which changes if one of them does."""
        return int(self.hash_bits(torch.tensor(hashes, dtype=torch.int64, device=self.hash_bits.table.device)))

    def _gather(self, rows: Sequence[_Row]) -> list[list[_Row]]:
        """Every rank's rows, on every rank; ranks may have unequal numbers of them, and agree on the largest first."""
        device = None if self.world.alone else device_of(self.world)
        own = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 2)
        most = int(all_reduce_max(torch.tensor([len(rows)], device=device), self.world))
        # A row of zeros is none: a key of 0 is as likely as a hash of 0.
        padded = torch.cat([own, own.new_zeros(most - len(rows), 2)])
        everyone = all_gather_no_grad(padded, (most,) * self.world.size, self.world).view(self.world.size, most, 2)
        return [[_Row(*row) for row in rank if row[0]] for rank in everyone.tolist()]

    def _differing_tensors(
        self, step: int, tables: Sequence[Sequence[_Row]], names: Mapping[int, str]
    ) -> tuple[list[Finding], int]:
        found = _differing(tables)
        findings = []
        for key, by_rank in list(found.items())[:MAX_NAMED]:
            culprits = contradicted(by_rank)
            shown = {rank: _hex(value) for rank, value in by_rank.items()}
            name = self._name(names.get(key, ""))
            decided_by = "majority" if culprits else ""
            findings.append(Finding(step, "differs between replicas", name, shown, culprits, decided_by))
        return findings, max(0, len(found) - MAX_NAMED)

    def _changed_anywhere(self, step: int, changed: Mapping[str, int]) -> tuple[list[Finding], int]:
        """This rank's and the other ranks' tensors that changed without an update."""
        rows = [_Row(number + 1, value) for number, value in enumerate(changed.values())]
        tables, names = self._gather(rows), list(changed)
        everything = [(rank, row) for rank, table in enumerate(tables) for row in table]
        findings = []
        for rank, row in everything[:MAX_NAMED]:
            name = self._name(names[row.key - 1] if rank == self.world.index else "")
            shown = {rank: _hex(row.value)}
            what = "changed between two updates, and no callback called control.model_changed"
            findings.append(Finding(step, what, name, shown, (rank,), "its own hash"))
        return findings, max(0, len(everything) - MAX_NAMED)

    def _name(self, own: str) -> str:
        """A name that some ranks know, on all of them; as bytes in a tensor."""
        device = None if self.world.alone else device_of(self.world)
        data = torch.zeros(1, _NAME_BYTES, dtype=torch.uint8)
        encoded = own.encode()[:_NAME_BYTES]
        data[0, : len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
        everyone = all_gather_no_grad(data.to(device or "cpu"), (1,) * self.world.size, self.world)
        spoken = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in everyone.tolist()]
        return next((name for name in spoken if name), "a tensor")

    # ---- findings ----

    def _found(self, step: int, findings: list[Finding], more: int, newest_good: int) -> CorruptionError:
        self._baseline = None
        self.undecided += [finding for finding in findings if not finding.culprits]
        self._write(findings)
        named = "\n  ".join(map(str, findings)) + (f"\n  and {more} more tensors" if more else "")
        said = f"step {step}: silent corruption of the training state:\n  {named}"
        return CorruptionError(said, newest_good, self._minority(findings))

    def _minority(self, findings: Iterable[Finding]) -> tuple[int, ...]:
        """The ranks that are wrong; none if they are half of the world: a wrong grad norm is wrong on many ranks."""
        culprits = {rank for finding in findings for rank in finding.culprits}
        return tuple(sorted(culprits)) if 2 * len(culprits) <= self.world.size else ()

    def exclusion(self) -> ExclusionError | None:
        """Once training a step again has said which of two replicas was wrong: what excludes it."""
        culprits = self._minority(self.decided)
        return ExclusionError(f"silent corruption: {self.decided[0]}", culprits) if culprits else None

    def _decide(self, step: int, hashes: Mapping[str, int]) -> None:
        """Replicas agree at a step where they once did not: the hash that came out again is the right one."""
        again = [finding for finding in self.undecided if finding.step == step]
        if not again:
            return
        self.undecided = [finding for finding in self.undecided if finding.step != step]
        right = [(finding, self._agreed(hashes.get(finding.tensor))) for finding in again]
        known = [decided(finding, value) for finding, value in right if value is not None]
        self.decided += known
        self._write(known)
        if self.world.index == 0:
            for finding in known:
                print_stderr(f"step {step}: {finding}")

    def _agreed(self, own: int | None) -> str | None:
        """The value of those ranks that hold the tensor, which agree; None for gathered weights: no rank keeps them."""
        tables = self._gather([] if own is None else [_Row(1, own)])
        return next((_hex(row.value) for table in tables for row in table), None)

    def _write(self, findings: Iterable[Finding]) -> None:
        if self.world.index != 0:
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        try:
            with os.fdopen(open_own(self.directory / FILE_NAME, flags), "a") as file:
                for finding in findings:
                    file.write(json.dumps(asdict(finding), separators=(",", ":")) + "\n")
        except OSError as error:
            # What was found is acted upon and told; the disk on which it is kept may be full.
            print_stderr(f"warning: {self.directory / FILE_NAME}: cannot be written: {error.strerror}")


# To the same checkpoint; a fault that comes back there is not cured by training again.
_MAX_ROLL_BACKS = 3


def roll_back(
    context: TrainContext, found: CorruptionError, hooks: Callback, watch: StateWatch, before: list[int]
) -> TrainState:
    """Load the newest checkpoint that the corruption has not reached, on all ranks; raise if there is none.

    A flip may have come between the comparison of a step and its copy for the checkpoint, so what was loaded is
    compared again with what was hashed then. ``before`` are the steps of earlier ones, to which this one is added.
    """
    policy = context.run.train.corruption.on_mismatch
    if context.memory is not None:
        # The bit may have flipped while a copy was made, and copies are not compared again.
        context.memory.forget_after(-1)
    if policy == "stop":
        raise found
    excluding = ExclusionError(str(found), found.culprits) if policy == "exclude" and found.culprits else None
    context.heartbeat.enter("checkpoint", found.newest_good)
    if (done := context.saver.finish()) is not None:
        hooks.on_save(done, context.saver.path_of(done))
    root, world, newest = context.directory / "checkpoints", context.groups["world"], found.newest_good
    while True:
        good = [step for step in committed_steps(root) if step <= newest] if context.leads else []
        step = from_rank_0(max(good, default=-1), world)
        if step < 0:
            none = f"{found}\nthere is no checkpoint from before it to go back to"
            raise excluding or CorruptionError(none, newest, from_the_beginning=True)
        if before.count(step) >= _MAX_ROLL_BACKS:
            raise CorruptionError(f"{found}\ngone back to step {step} {_MAX_ROLL_BACKS} times already", newest)
        loaded = load_into(final_path(root, step), context.local_model, context.optimizer)
        if watch.agrees(step):
            break
        newest = step - 1
        if context.leads:
            # Another start would load it.
            final_path(root, step).rename(root / f"{final_path(root, step).name}.corrupt")
    if excluding is not None:
        if context.leads:
            print_stderr(str(found))
        raise excluding
    before.append(step)
    watch.forget_after(step)
    if context.leads:
        print_stderr(f"{found}\ntraining again from step {step}")
    hooks.on_roll_back(step, str(found))
    return position_of(context, final_path(root, step), loaded)


def decided(finding: Finding, right: str) -> Finding:
    """The same finding with its culprits, now that the right hash is known."""
    wrong = tuple(rank for rank, value in finding.hashes.items() if value != right)
    return Finding(finding.step, finding.what, finding.tensor, finding.hashes, wrong, "training the step again")


def contradicted(by_rank: Mapping[int, int]) -> tuple[int, ...]:
    """Ranks whose value more than half of all ranks contradict; none where no value has a majority."""
    (value, votes), *_ = Counter(by_rank.values()).most_common(1)
    if 2 * votes <= len(by_rank):
        return ()
    return tuple(rank for rank, other in by_rank.items() if other != value)


def _differing(tables: Sequence[Sequence[_Row]]) -> dict[int, dict[int, int]]:
    """By key the values of ranks, where they are not all the same."""
    by_key: dict[int, dict[int, int]] = {}
    for rank, table in enumerate(tables):
        for row in table:
            by_key.setdefault(row.key, {})[rank] = row.value
    return {key: by_rank for key, by_rank in by_key.items() if len(set(by_rank.values())) > 1}


def _key(*parts: object) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _hex(value: int) -> str:
    return f"{value & (2**64 - 1):016x}"


def read_findings(directory: Path) -> list[Finding]:
    """Those of a run, oldest first."""
    path = directory / FILE_NAME
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        data = json.loads(line)
        data["hashes"] = {int(rank): value for rank, value in data["hashes"].items()}
        data["culprits"] = tuple(data["culprits"])
        found.append(Finding(**data))
    return found
