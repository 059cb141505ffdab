# One thread per process: the tests start many, and the machine's cores are for them.
export OMP_NUM_THREADS ?= 1
# Python keeps its bytecode: otherwise each of them compiles every source file again.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python
# Another seed with every commit, so that cases which nobody has tried come up; MOEFOLD_SEED=N repeats one.
SEED = $(shell $(PYTHON) -m tests.commit_seed)

.PHONY: install check format lint types layers test prove nightly docs

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
	$(PYTHON) -m pytest -m "not slow and not nightly" -n 2 --dist worksteal -q

# Does any layout compute what one process computes?
prove:
	$(PYTHON) -m moefold.cli.main prove --kept tests/ranks/failed_cases.jsonl
	$(PYTHON) -m moefold.cli.main prove --cases 40 --max-world 8 --seed $(SEED)

# The docs site in site/; `pip install -e ".[docs]"` brings its builders, npm the planner's Pyodide.
docs:
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict
	$(PYTHON) -m benchmarks.planner_page site/planner

# The long version of both, for a machine that has the night.
nightly:
	$(PYTHON) -m pytest -n 2 --dist worksteal -q
	$(PYTHON) -m moefold.cli.main prove --cases 1000 --max-world 8 --seed $(SEED)
	$(PYTHON) -m moefold.cli.main prove --mutants
	$(PYTHON) -m tests.signal_draws --draws 500 --seed $(SEED) --piece 1/2
	$(PYTHON) -m tests.signal_draws --draws 500 --seed $(SEED) --piece 2/2
	$(PYTHON) -m tests.hang_draws --count 100 --seed $(SEED)
	$(PYTHON) -m tests.loss_of_ranks
	$(PYTHON) -m tests.straggler_draws --count 10 --seed $(SEED)
	$(PYTHON) -m tests.kill_draws --kills 1000 --seed $(SEED) --piece 1/2
	$(PYTHON) -m tests.kill_draws --kills 1000 --seed $(SEED) --piece 2/2
	$(PYTHON) -m tests.restart_growth --restarts 200
	$(PYTHON) -m tests.data_resume_draws --count 20 --seed $(SEED)
	$(PYTHON) -m tests.soak --minutes 90 --between 60 --seed $(SEED)
	$(PYTHON) -m tests.security.exploit_table
	$(PYTHON) -m tests.fuzz --cases 10000 --seed $(SEED)
	$(PYTHON) -m tests.search_restrictions --count 500 --brute 50 --seed $(SEED)
	$(PYTHON) -m tests.save_faults --count 60 --seed $(SEED)
	$(PYTHON) -m tests.host_faults --count 20 --seed $(SEED)
	$(PYTHON) -m tests.peer_copies --count 10 --seed $(SEED)
