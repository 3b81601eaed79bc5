# `make quickstart` and `make test` set everything up by themselves; `make setup`
# does only that. The project is installed so that its commands run in any folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# `make setup LOCK=` takes the newest versions that requirements.txt allows.
LOCK ?= requirements.lock
LOCKED := $(if $(LOCK),--constraint $(LOCK))
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: setup quickstart quickstart-full serve test test-all test-research bench lint types docs lock clean

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

# Of the project's own studies, which no user needs.
test-research: $(VENV)/.test-ready
	$(PYTEST) research/tests

# Every property test with all its cases, every family, mesh, fault and kill.
test-all: types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	ANYSEARCH_TEST_ALL=1 $(PYTEST) tests

bench: $(VENV)/.test-ready
	JAX_PLATFORMS=cpu $(BIN)/python -m bench.rollout --threads=1
	JAX_PLATFORMS=cpu $(BIN)/python -m bench.train_step --threads=1

lint: $(VENV)/.test-ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.test-ready
	$(BIN)/mypy

# The site of docs/, in site/.
docs: $(VENV)/.docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The newest versions that requirements.txt and the extras allow become the locked
# ones, which each extra shares with those before it. Nothing is installed. Run the
# tests with them before you commit the file.
EXTRAS := test milvus docs plan tpu cuda13 cuda12
lock: $(VENV)/bin/python
	sed -n '/^#/p' requirements.lock > requirements.lock.writing
	for extra in $(EXTRAS); do \
	  $(PIP) --dry-run --ignore-installed --report $(VENV)/lock.json \
	    --constraint requirements.lock.writing ".[$$extra]" && \
	  $(BIN)/python -c "$$MERGE" || exit 1; done
	mv requirements.lock.writing requirements.lock

define MERGE
import json
report = json.load(open("$(VENV)/lock.json"))
lines = open("requirements.lock.writing").read().splitlines()
comments = [line for line in lines if line.startswith("#")]
found = {line for line in lines if not line.startswith("#")}
for package in report["install"]:
  name, version = (package["metadata"][x] for x in ("name", "version"))
  if name != "anysearch_jax":
    found.add(name + "==" + version)
lines = comments + sorted(found, key=str.lower)
open("requirements.lock.writing", "w").write("\n".join(lines) + "\n")
endef
export MERGE

clean:
	rm -rf $(VENV) site .jax_cache

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name it: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-ready: requirements.txt pyproject.toml $(LOCK) $(VENV)/bin/python
	$(PIP) --editable . $(LOCKED)
	touch $@

$(VENV)/.test-ready: $(VENV)/.run-ready
	$(PIP) --editable '.[test]' $(LOCKED)
	touch $@

$(VENV)/.docs-ready: $(VENV)/.run-ready
	$(PIP) --editable '.[docs]' $(LOCKED)
	touch $@
