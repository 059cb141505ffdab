from __future__ import annotations

from moefold.errors import ConfigError, MoefoldError, Problem, UnknownNameError, did_you_mean, nearest


def test_all_problems_are_carried_and_printed() -> None:
    error = ConfigError(Problem("parallel.ep", "3 does not divide 8", "use 2 or 4"), Problem("seed", "not a number"))
    assert isinstance(error, MoefoldError)
    assert (error.path, error.message, error.fix) == ("parallel.ep", "3 does not divide 8", "use 2 or 4")
    assert str(error) == "parallel.ep: 3 does not divide 8; use 2 or 4\nseed: not a number"


def test_the_nearest_word_is_found_and_a_far_one_is_not() -> None:
    assert nearest("paralel", ["model", "parallel"]) == "parallel"
    assert nearest("zzz", ["model", "parallel"]) is None
    # Words that share letters are not near; the beginning of a name is.
    assert nearest("mamba", ["llama", "mixtral", "olmoe"]) is None
    assert nearest("qwen3", ["qwen3_30b_a3b", "olmoe_1b_7b"]) == "qwen3_30b_a3b"
    assert nearest("tq", ["tp", "cp", "pp"]) == "tp"
    assert nearest("parallel" * 100_000, ["parallel"]) is None
    assert did_you_mean("zzz", ["model"]) == ""


def test_an_unknown_name_lists_what_is_known() -> None:
    assert str(UnknownNameError("recipe", "mixtrl", ["olmoe", "mixtral"])) == (
        "no recipe named 'mixtrl'; did you mean 'mixtral'? known: mixtral, olmoe"
    )
