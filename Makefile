# Everything runs in .venv, which `make setup` creates; each target does that first.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed
SECONDS ?= 60

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench soak clean

help:  ## show this
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## create .venv and install manyhands in it; quick when run again

$(BIN)/pip:
	$(PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo "Could not create .venv. On Debian: apt install python3-venv" >&2; exit 1; }

$(READY): pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing into .venv: a minute or two the first time."
	@$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup  ## train on handwritten digits with two workers, and kill one
	$(BIN)/manyhands demo

test: setup  ## run the tests
	$(BIN)/python -m pytest

check: setup  ## format, lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python -m pytest

format: setup  ## format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## measure beside bare PyTorch
	$(BIN)/python benchmarks/data_parallel.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/recovery.py

soak: setup  ## disturb runs at random: make soak SECONDS=600
	$(BIN)/python -m tests.soak --seconds $(SECONDS)

clean:  ## remove .venv and caches; runs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
