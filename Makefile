# Each target makes what it needs. On a fresh machine, python3 (3.11 or newer) and make are enough.
# Override on the command line: make test PYTHON=python3.12 WORKERS=4 PYTEST_ARGS="-k reshard"

PYTHON      ?= python3
WORKERS     ?= 2
PYTEST_ARGS ?=

VENV := .venv
RUN  := $(VENV)/bin/python

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow fuzz mutants lint format bench bench-tpu bench-rest clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.examples ## train a small GPT on one device and on eight, under four schemes
	$(RUN) -m examples.gpt.demo

test: $(VENV)/.test ## the default suite
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-slow: $(VENV)/.test ## the long sweeps, which `make test` leaves out
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal -m slow $(PYTEST_ARGS)

fuzz: $(VENV)/.test ## random programs against one device; again to go on (FUZZ_ARGS="--cases 1000")
	$(RUN) -m tests.fuzz --cases 100000 --workers $(WORKERS) --state build/fuzz.json $(FUZZ_ARGS)

mutants: $(VENV)/.test ## break each rule on purpose: its tests must turn red
	$(RUN) -m tests.mutants $(MUTANTS_ARGS)

lint: $(VENV)/.dev ## style, format and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright --pythonpath $(RUN)

format: $(VENV)/.dev ## rewrite files in the project's format
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(VENV)/.examples ## the suite beside XLA's own partitioners: a table, build/bench.json and .html
	$(RUN) -m benchmarks.suite --time --json build/bench.json --html build/bench.html $(BENCH_ARGS)

bench-tpu: $(VENV)/.tpu ## the same compiled for TPUs that are not there, by libtpu; nothing is run
	$(RUN) -m benchmarks.suite.tpu --json build/bench_tpu.json $(BENCH_ARGS)

bench-rest: $(VENV)/.examples ## the older benchmarks: operators, loops, GPT, reshards, schedules, compiles
	$(RUN) -m benchmarks.operators
	$(RUN) -m benchmarks.loops
	$(RUN) -m benchmarks.gpt
	$(RUN) -m benchmarks.reshard
	$(RUN) -m benchmarks.schedules
	$(RUN) -m benchmarks.compile_time

clean: ## remove the environment and the caches
	rm -rf $(VENV) .hypothesis .pytest_cache .ruff_cache build dist

# The environment. A changed pyproject.toml makes it anew; each stamp is one group of packages in it.
$(VENV)/.made: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "meshwise needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + \
	  ". Name another: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv --clear $(VENV) || { \
	  echo "$(PYTHON) cannot make environments. On Debian or Ubuntu: apt install python3-venv" >&2; \
	  exit 1; }
	@touch $@

$(VENV)/.examples $(VENV)/.test $(VENV)/.dev $(VENV)/.tpu: $(VENV)/.%: $(VENV)/.made
	$(RUN) -m pip install --disable-pip-version-check -e '.[$*]'
	@touch $@
