# Each target sets up what it needs: a virtual environment in .venv with the exact versions of constraints.txt.
#   make demo     generate the zoo, run one emitted op on this machine, show what was made
#   make test     pass the tests
#   make check    lint, types, and whether generated/ is what specs/ and templates/ produce
#   make clean    remove the environment and caches

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
NAME   ?= gated_deltanet
# Two workers fit the smallest machine that these tests are run on; JOBS=auto takes every core.
JOBS   ?= 2

.PHONY: demo test check clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.ready
	$(BIN)/recgen generate
	$(BIN)/python -m recgen.demo $(NAME)

test: $(VENV)/.ready
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

check: $(VENV)/.ready
	$(BIN)/ruff check recgen tests
	$(BIN)/ruff format --check recgen tests
	$(BIN)/mypy
	$(BIN)/recgen check

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("recgen needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,client,dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
