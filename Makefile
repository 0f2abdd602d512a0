# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RANKS := OMP_NUM_THREADS=1

.PHONY: help demo test check bench docs prove clean

help: ## what there is
	@grep -hE '^[a-z]+:.*##' Makefile | sed 's/:.*##/\t/'

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Paceline needs Python 3.11 or later, and $(PYTHON) is older: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0 --editable '.[dev]'
	touch $@

demo: $(VENV)/.installed ## install, then train a small model on real text and show that a killed run resumes exactly
	$(BIN)/paceline demo

check: $(VENV)/.installed ## format, lint, types, import contracts, house rules, unit tests
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python tools/house.py
	$(RANKS) $(BIN)/python -m pytest tests/unit

test: check ## all of it: also several ranks, parity with one process, the program as a whole, the docs
	$(RANKS) $(BIN)/python -m pytest tests/ranks tests/numerics tests/system tests/docs

prove: $(VENV)/.installed ## the whole matrix of hashes (slow)
	$(RANKS) PACELINE_MATRIX=full $(BIN)/python -m pytest tests/numerics

bench: $(VENV)/.installed ## throughput and memory against the peers (see benchmarks/README.md)
	$(BIN)/python benchmarks/throughput.py --preset quick

docs: $(VENV)/.installed ## the documentation, as a site in site/
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python tools/reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove runs, caches and the environment
	rm -rf $(VENV) runs site .ruff_cache .pytest_cache .hypothesis .import_linter_cache
