# One thread per process: the tests start many, and the machine's cores are for them.
export OMP_NUM_THREADS ?= 1
PYTHON ?= python

.PHONY: install check format lint types layers test prove nightly

install:
	$(PYTHON) -m pip install -e ".[dev]"

# What every change must pass, in a few minutes.
check: lint types layers test

# Rewrites files; `lint` only looks.
format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

lint:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .

types:
	$(PYTHON) -m mypy

layers:
	$(PYTHON) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

test:
	$(PYTHON) -m pytest -m "not slow and not nightly" -n 2 -q

# Does any layout compute what one process computes?
prove:
	$(PYTHON) -m moefold.cli.main prove --cases 40 --max-world 8 --seed 1

# The long version of both, for a machine that has the night.
nightly:
	$(PYTHON) -m pytest -n 2 -q
	$(PYTHON) -m moefold.cli.main prove --cases 300 --max-world 8 --seed 2
	$(PYTHON) -m moefold.cli.main prove --mutants
