# Everything runs in .venv, which `make setup` creates; each target does that first.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed
SECONDS ?= 60
VERSIONS ?= 2.12.1 2.15.0
# As many processes as cores share the tests; `make test SIDE_BY_SIDE=` runs them one by one.
SIDE_BY_SIDE ?= -n logical --maxprocesses 4
PYTEST := $(BIN)/python -m pytest -rfEs $(SIDE_BY_SIDE)

.DEFAULT_GOAL := help
.PHONY: help setup tools demo test test-all test-versions check format bench docs soak soak-hosts clean

help:  ## show this
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## create .venv and install manyhands in it; quick when run again

$(BIN)/pip:
	$(PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo "Could not create .venv. On Debian: apt install python3-venv" >&2; exit 1; }

NATIVE := $(shell find manyhands -name '*.c')

$(READY): pyproject.toml constraints.txt $(NATIVE) | $(BIN)/pip
	@echo "Installing into .venv: a minute or two the first time."
	@$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	@touch $@

TOOLS := iproute2 openmpi-bin openssh-client openssh-server

tools:  ## install, where we may, what some tests need: they are skipped without it
	@if ! { command -v ip && command -v tc && command -v mpirun && command -v ssh && \
	        ls /usr/sbin/sshd; } >/dev/null 2>&1 && \
	    [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing $(TOOLS)."; \
	  { apt-get update; DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y --no-install-recommends $(TOOLS); } >/dev/null 2>&1 || \
	    echo "Could not install them." >&2; \
	fi

demo: setup  ## train on handwritten digits with two workers, and kill one
	$(BIN)/manyhands demo

# They start some hundred processes, and each would compile our code anew.
test test-all check: export PYTHONDONTWRITEBYTECODE =

test: setup tools  ## run the tests
	$(PYTEST) -m "not slow"

test-all: setup tools  ## run the tests, the slow ones too
	$(PYTEST)

test-versions: setup  ## the same bits on other torch: make test-versions VERSIONS="2.12.1 2.15.0@python3.12"
	$(BIN)/python -m tests.versions $(VERSIONS)

check: setup tools  ## format, lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(PYTEST) -m "not slow"

format: setup  ## format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## measure beside bare PyTorch
	$(BIN)/python benchmarks/data_parallel.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/readers.py
	$(BIN)/python benchmarks/compile.py

docs: setup  ## write the tables of options in docs/ anew
	$(BIN)/python -m tests.support.doc_tables

soak: setup  ## disturb runs at random: make soak SECONDS=600
	$(BIN)/python -m tests.soak.one_host --seconds $(SECONDS)

soak-hosts: setup tools  ## disturb runs on several hosts: make soak-hosts SECONDS=600
	$(BIN)/python -m tests.soak.many_hosts --seconds $(SECONDS)

clean:  ## remove .venv and caches; runs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
