"""Reading a run strictly, saying everything that is wrong at once, and writing it back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefold.config.attention import MLAConfig
from moefold.config.loading import dump_run, load_run_file, override, parse_run, run_from_mapping
from moefold.config.moe import CapacityConfig
from moefold.config.run import RunConfig
from moefold.config.strict import read_scalar
from moefold.errors import ConfigError


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_run(text)
    return [str(problem) for problem in error.value.problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("3.", 3.0),
        ("-.5E+2", -50.0),
        ("10_000", 10_000),
        ("+7", 7),
        ("0", 0),
        ("true", True),
        ("null", None),
        ("", None),
        ("no", "no"),
        ("0x10", "0x10"),
        ("1:30", "1:30"),
        ("2001-01-01", "2001-01-01"),
        ("-", "-"),
        ("1__0", "1__0"),
        ("٣", "٣"),
    ],
)
def test_what_a_plain_word_means(text: str, value: object) -> None:
    found = read_scalar(text)
    assert (found, type(found)) == (value, type(value))


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: small\nmodel:\n  attention: {kind: mla, q_latent: null}\noptim:\n  lr: 1e-3\n  beta1: 1\n")
    run = load_run_file(path)
    assert (run.name, run.optim.lr, run.optim.beta1) == ("small", 1e-3, 1.0)
    assert run.model.attention == MLAConfig(q_latent=None)
    assert parse_run("") == parse_run("---\n") == run_from_mapping({}) == RunConfig()


def test_all_problems_come_at_once_with_dotted_keys_and_the_nearest_key() -> None:
    assert problems(
        "sead: 1\nseed: 010\nname: a\nname: b\nparallel: {ep: '8', tp: 2.0, dispatcher: ring}\n"
        "model:\n  attention: {kind: gqa, num_head: 4}\n  rope: 3\n  norm_eps: .nan\n  moe: {router: {fp32: yes}}\n"
    ) == [
        "seed: line 2: 010 is octal to some readers; write 10",
        "name: line 4: this key is in line 3 already; remove one of them",
        "model.norm_eps: nan is not a finite number",
        "model.attention.num_head: unknown key; did you mean 'num_heads'? known here: kind, num_heads, num_kv_heads, "
        "head_dim, qk_norm, qk_norm_when, rope_dim, qkv_bias, out_bias, output_gate, sinks, window, window_every, "
        "chunk, nope_every, nope_temperature, nope_floor",
        "model.rope: must be a section of keys, not 3; write its keys below it, each with a space after its colon",
        "model.moe.router.fp32: must be true or false, not 'yes'",
        "parallel.tp: must be a whole number, not 2.0",
        "parallel.ep: must be a whole number, not '8'; remove the quotes",
        "parallel.dispatcher: cannot be 'ring'; choose 'all_to_all', 'all_gather', "
        "'deduplicated', 'two_level', 'all_to_all_aligned', 'all_to_all_bounded', 'adaptive', 'deepep', "
        "'deepep_elastic', 'symmetric_memory' or 'hybridep'",
        "sead: unknown key; did you mean 'seed'? "
        "known here: name, seed, model, parallel, precision, kernels, data, optim, train, memory",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- 1", "<root>: must be a section of keys, not a list"),
        ("seed: *x", "seed: line 1: anchors and aliases are not read; write the value out"),
        ("seed: &x 1", "seed: line 1: anchors and aliases are not read; write the value out"),
        (
            "seed: !!python/object:os.system 1",
            "seed: line 1: tag tag:yaml.org,2002:python/object:os.system is not read",
        ),
        ("seed: 1\n--- \nseed: 2", "<root>: more than one document; remove the second `---`"),
        ("seed: [1", "line 2, column 1: not YAML: "),
        ("seed: \x01", "<root>: not YAML text: "),
        ("? [1]\n: 2", "<root>: line 1: a key must be one word"),
        ("seed: " + "[" * 100, "seed[0]"),
        ("seed: " + "9" * 30, "seed: a whole number of 100 bits does not fit into 64"),
        ("seed: " + "9" * 6000, "seed: line 1: a number of 6000 characters is longer than any that is meant"),
        ("model: {attention: {num_heads: 4}}", "model.attention.kind: is missing; choose from gqa, mla"),
        ("model: {attention: {kind: mlaa}}", "model.attention.kind: cannot be 'mlaa'; did you mean 'mla'? choose"),
        (
            "model: {moe: {router: {group_score: top2_sum}}}",
            "model.moe.router.group_score: cannot be 'top2_sum'; it is called topk_sum, which adds top_k /",
        ),
        ("x: 1\n" * 2 + "#" * 250_000, "<root>: 250,010 characters; a configuration has at most 250,000"),
    ],
)
def test_refused(text: str, expected: str) -> None:
    assert problems(text)[0].startswith(expected)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"name: \xff")
    for path, words in ((tmp_path / "none", "No such file"), (tmp_path, "directory"), (tmp_path / "latin", "UTF-8")):
        with pytest.raises(ConfigError, match=words):
            load_run_file(path)


def test_python_data_is_held_to_the_same_rules() -> None:
    itself: dict[str, Any] = {}
    itself["model"] = itself
    for data in (itself, {"seed": 10**5000}, {"name": object()}, {"name": "\ud800"}, {1: 2}, 3):
        with pytest.raises(ConfigError):
            run_from_mapping(data)


def test_overrides() -> None:
    run = RunConfig()
    for changes in (["--parallel.ep", "8"], ["--parallel.ep=8"], ["parallel.ep=8"], {"parallel.ep": "8"}):
        assert override(run, changes) == replace(run, parallel=replace(run.parallel, ep=8))
    padded = override(run, {"model.moe.capacity.pad": "true"})
    assert padded.model.moe is not None and padded.model.moe.capacity == CapacityConfig(pad=True)
    assert override(padded, ["--model.moe.capacity", "null"]) == run
    assert override(run, ["--name", "'8'"]).name == "8"
    assert override(run, ["--optim.lr", "1e-3"]).optim.lr == 1e-3
    assert override(run, ["--memory.recompute", "[attention, experts]"]).memory.recompute == ("attention", "experts")
    assert override(run, ["--memory.recompute=[]"]) == run


def test_a_change_of_kind_starts_from_that_kinds_defaults() -> None:
    changed = override(RunConfig(), ["--model.attention.kv_latent=32", "--model.attention.kind=mla"])
    assert changed.model.attention == MLAConfig(kv_latent=32)
    assert override(RunConfig(), {"model.moe.router.kind": "sinkhorn"}).model.moe is not None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["--paralel.ep", "8"], "paralel: unknown key; did you mean 'parallel'?"),
        (["--parallel.epp", "8"], "parallel.epp: unknown key; did you mean 'ep'?"),
        (["--seed.x", "8"], "seed.x: seed is a value, not a section of keys"),
        (["--seed"], "seed: no value given; write --seed VALUE"),
        (["--seed", "010"], "seed: 010 is octal"),
        (["--" + "a." * 5000, "1"], "a.a.a"),
    ],
)
def test_overrides_that_cannot_be(changes: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        override(RunConfig(), changes)
    assert str(error.value).startswith(expected)


@given(st.text(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False))
def test_a_written_run_reads_back_as_itself(name: str, seed: int, lr: float) -> None:
    run = RunConfig(name=name, seed=seed)
    run = replace(run, optim=replace(run.optim, lr=lr), model=replace(run.model, attention=MLAConfig(q_latent=None)))
    assert parse_run(dump_run(run)) == run


@pytest.mark.parametrize("name", ["1e-3", "010", "null", "", "yes", "9" * 50, ".nan", "~", "a: b", "# c", "\x85", "😀"])
def test_a_name_that_looks_like_something_else_survives(name: str) -> None:
    assert parse_run(dump_run(RunConfig(name=name))).name == name
