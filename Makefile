# `make quickstart` and `make test` set everything up by themselves; `make setup`
# does only that. The project is installed so that its commands run in any folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# `make setup LOCK=` takes the newest versions that requirements.txt allows.
LOCK ?= requirements.lock
LOCKED := $(if $(LOCK),--constraint $(LOCK))
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: setup quickstart quickstart-full serve test test-all bench lint docs lock clean

setup: $(VENV)/.run-ready
	@echo 'set up; now: . $(BIN)/activate'

quickstart: $(VENV)/.run-ready
	$(BIN)/python -m launch.quickstart

quickstart-full: $(VENV)/.run-ready
	$(BIN)/python -m launch.quickstart --full --output=runs/quickstart-full

serve: $(VENV)/.run-ready
	$(BIN)/python -m launch.serve --config=configs/quickstart.py \
	  $(if $(wildcard runs/quickstart/anysearch-42/policy/config.json),--hf=runs/quickstart/anysearch-42/policy)

PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest -rs -n $(or $(WORKERS),auto) \
	--dist loadfile --no-loadscope-reorder

test: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) -m 'not slow' tests

# Every property test with all its cases, every family, mesh, fault and kill.
test-all: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	ANYSEARCH_TEST_ALL=1 $(PYTEST) tests

bench: $(VENV)/.test-ready
	JAX_PLATFORMS=cpu $(BIN)/python -m bench.quickstart

lint: $(VENV)/.test-ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site of docs/, in site/. It reads docstrings without importing the library,
# so its environment needs nothing else.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

# The newest versions that requirements.txt allows become the locked ones; run the
# tests with them before you commit the file.
lock:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	(sed -n '/^#/p' requirements.lock; .venv-lock/bin/python -m pip freeze) > requirements.lock.writing
	mv requirements.lock.writing requirements.lock
	rm -rf .venv-lock

clean:
	rm -rf $(VENV) .venv-docs site .jax_cache

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name it: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-ready: requirements.txt $(LOCK) $(VENV)/bin/python
	$(PIP) -r requirements.txt $(LOCKED)
	$(PIP) --no-deps --editable .
	touch $@

$(VENV)/.test-ready: requirements-test.txt $(VENV)/.run-ready
	$(PIP) -r requirements-test.txt $(LOCKED)
	touch $@

.venv-docs/.ready: requirements-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	touch $@
