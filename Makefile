# Baton needs Python 3.11 to 3.13 and nothing else; everything below makes its own virtual environment first.

MODEL ?= models/storyteller-7m
UP_FLAGS ?=
CHAOS_SEED ?= 0
CHAOS_SEEDS ?= 1000
CHAOS_KILLS ?= 1000
SOAK_REQUESTS ?= 1000000
CONSTRAINT_SEEDS ?= 2000
HOSTILE_CASES ?= 2000
HOSTILE_SEED ?= 1
PYTEST_FLAGS ?=
# Many tests wait for processes of theirs more than they compute. A process that crashes ends the run: its place in it
# cannot be taken over. Files run in the order of tests/slow_files.txt, not by their numbers of tests.
TEST_WORKERS ?= 3
# Services start faster with bytecode, which some images do not keep. Plugins that come with other packages are not
# loaded, nor are the packages' asserts rewritten: that took a third of each process's collection.
# The processes share the cores, so each computes on one, and waits for threads without spinning.
TEST_ENV := PYTHONDONTWRITEBYTECODE= PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 \
  PYTEST_PLUGINS=asyncio,timeout,xdist,hypothesispytest OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
# Installed before the rest, so that nothing else chooses another. `make run TORCH=torch==2.11.0` takes another one.
TORCH ?= torch==2.13.0
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
  $$name -c '$(SUPPORTED)' 2>/dev/null && echo $$name && break; done)
VENV ?= .venv
PROTO_VENV ?= .venv-proto

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PROTOS := $(wildcard proto/baton/v1/*.proto proto/baton/envoy/*.proto proto/baton/otlp/v1/*.proto)
# The contracts of the releases, and this one's number: patches share one.
RELEASED := $(wildcard proto/released/*.binpb)
VERSION := $(shell sed -nE 's/^version = "([0-9]+\.[0-9]+)\..*"/\1/p' pyproject.toml)
# `check` runs these, `test-deploy` the rest of tests/deploy, and `test-faults` the third; `test` runs none of them.
CHECKED_TESTS := tests/deploy/manifests tests/docs
FAULT_TESTS := tests/e2e/faults/transfer
BENCHES := $(sort $(patsubst bench_%.py,%,$(notdir $(wildcard tests/bench/bench_*.py tests/bench/*/bench_*.py))))

.DEFAULT_GOAL := help
.PHONY: help run test test-kernels test-deploy test-faults test-clients test-context test-speculation check wheel docs fmt proto release-contract lock audit pin-images metrics dashboards test-gpu bench bench-gpu churn chaos soak chaos-sim search-constraints hostile clean

help: ## Show this list
	@echo "Baton, a gRPC-first LLM inference platform. make run, then ask it something."
	@echo
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
	  || sed -nE 's/^([a-z-]+):.*## (.*)/  make \1  \2/p' $(MAKEFILE_LIST)
	@echo
	@echo "  make run MODEL=/path/to/a/hugging-face/folder   serves another model"
	@echo "  make run UP_FLAGS='--rest-listen 0.0.0.0:8000'  passes flags to 'baton up' ($(BIN)/baton up --help)"

run: $(VENV)/.installed ## Serve the sample model through five services on this machine
	@exec $(BIN)/baton up --model "$(MODEL)" $(UP_FLAGS)

test: $(VENV)/.installed-dev ## Run every test that needs no GPU, but for those of `check` and of the three targets below
	@$(TEST_ENV) $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 \
	  $(addprefix --ignore ,tests/docs tests/deploy $(FAULT_TESTS)) $(PYTEST_FLAGS)

test-kernels: $(VENV)/.installed-dev ## Run the small cases of the kernels' tests in Triton's interpreter
	@$(TEST_ENV) TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 -m interpreted $(PYTEST_FLAGS) tests/kernels

test-deploy: $(VENV)/.installed-dev ## Try the images' files, the applied manifests, the alerts and the dashboards
	@$(TEST_ENV) $(BIN)/python -m pytest -q -n 2 --dist loadfile --ignore tests/deploy/manifests $(PYTEST_FLAGS) tests/deploy

test-faults: $(VENV)/.installed-dev ## Disturb hand-overs in every state, for every kind of KV and transport
	@$(TEST_ENV) $(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_FLAGS) $(FAULT_TESTS)

test-clients: $(VENV)/.installed-dev ## Run clients that others wrote, each in an environment of its own, against running services
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m '' $(PYTEST_FLAGS) tests/clients

check: $(VENV)/.installed-dev $(PROTO_VENV)/.installed ## Lint, types, layers, contracts and their generated code, manifests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	@for image in $(RELEASED); do echo "buf breaking against $$image"; \
	  $(BIN)/buf breaking --against "$$image" || exit 1; done
	@rm -rf build/proto && mkdir -p build/proto
	@$(call generate,build/proto)
	diff -r -x '*.proto' -x __pycache__ build/proto/baton/v1 proto/baton/v1
	diff -r -x '*.proto' -x __pycache__ build/proto/baton/envoy proto/baton/envoy
	diff -r -x '*.proto' -x __pycache__ build/proto/baton/otlp proto/baton/otlp
	$(BIN)/python -m pytest -q $(CHECKED_TESTS)
	@$(build_site)

wheel: $(VENV)/.installed-dev ## Build the wheel in dist/, and try it in environments of its own
	@rm -rf dist && $(BIN)/python -m hatchling build --target wheel --directory dist
	@$(BIN)/python -m pytest -q -n 0 tests/services/test_wheel.py

docs: $(VENV)/.installed-dev ## Build the pages of docs/ strictly, and the reference from the code, into build/site
	@$(build_site)
	@echo "open build/site/index.html"

fmt: $(VENV)/.installed-dev ## Format the code and the contracts
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format -w

proto: $(VENV)/.installed-dev $(PROTO_VENV)/.installed ## Regenerate the code of proto/
	$(BIN)/buf lint
	$(call generate,proto)

release-contract: $(VENV)/.installed-dev ## Keep today's contract as that of this version, against which `make check` looks for breaking changes
	@test ! -e proto/released/$(VERSION).binpb || { echo "proto/released/$(VERSION).binpb is there: a released contract stays as it is"; exit 1; }
	@mkdir -p proto/released
	$(BIN)/buf build --path proto/baton/v1 --exclude-source-info -o proto/released/$(VERSION).binpb

lock: $(VENV)/.installed-dev ## Pin every dependency of the product anew, with hashes, in requirements/
	$(PIP) uv==0.13.9
	$(BIN)/python requirements/lock.py make

audit: $(VENV)/.installed-dev ## Look the pinned dependencies up among the known vulnerabilities; needs the network
	$(PIP) pip-audit==2.10.1
	$(BIN)/python requirements/audit.py $(AUDIT_FLAGS)

pin-images: | $(VENV)/bin/python ## Write the digests of the base images into deploy/; needs their registry
	$(BIN)/python requirements/images.py $(IMAGES_FLAGS)

metrics: $(VENV)/.installed-dev ## Write deploy/metrics.md, the table of every metric
	@mkdir -p build
	@sed '/^## /,$$d' deploy/metrics.md > build/metrics.md && $(BIN)/baton metrics --markdown >> build/metrics.md
	@mv build/metrics.md deploy/metrics.md

dashboards: $(VENV)/.installed-dev ## Write deploy/grafana/dashboards
	@$(BIN)/python deploy/grafana/make_dashboards.py

test-context: $(VENV)/.installed-dev ## Ask the sample model for a name from 32 k tokens ago, on the CPU
	@$(BIN)/python -m pytest -n 0 -m long tests/worker/executors/cpu/test_sample_context.py

test-speculation: $(VENV)/.installed-dev ## Compare 10,000 requests of mixed parameters with and without speculation, on two cores
	@$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadgroup --max-worker-restart 0 -m long tests/worker/speculation

test-gpu: $(VENV)/.installed-dev ## Run the tests that need an NVIDIA GPU
	@$(BIN)/python -c 'import torch; assert torch.cuda.is_available(), "make test-gpu needs an NVIDIA GPU and a torch that sees it"'
	@$(BIN)/python -m pytest -m gpu $(PYTEST_FLAGS)

bench: $(VENV)/.installed-dev ## Run every benchmark that needs nothing else; `make bench NAME=wire` runs one
	@set -e; for name in $(if $(NAME),$(NAME),$(filter-out engine kernels policies encoders_gpu encoder_figures,$(BENCHES))); do \
	  echo "== $$name"; $(BIN)/baton bench $$name $(BENCH_FLAGS); done

bench-gpu: $(VENV)/.installed-dev ## Run the engine's and the kernels' benchmarks on an NVIDIA GPU; JSON in build/bench
	@mkdir -p build/bench
	@code=0; \
	$(BIN)/baton bench kernels --json build/bench/kernels.json || code=1; \
	$(BIN)/baton bench engine --preset-table all --json build/bench/engine.json || code=1; \
	$(BIN)/baton bench encoder_figures --json build/bench/encoders.json || code=1; \
	exit $$code

churn: $(VENV)/.installed-dev ## Cancel 10,000 requests and kill workers at random phases of the KV hand-over; nothing may leak
	@$(BIN)/python tests/bench/transfer/churn.py $(CHURN_FLAGS)

chaos: $(VENV)/.installed-dev ## Kill CHAOS_KILLS workers under load, break everything else too, overload and soak it; the table, by CHAOS_SEED
	@$(BIN)/python tests/chaos/run.py --seed $(CHAOS_SEED) --kills $(CHAOS_KILLS) --soak-requests $(SOAK_REQUESTS) $(CHAOS_FLAGS)

soak: $(VENV)/.installed-dev ## Answer SOAK_REQUESTS short requests with faults on: what leaks, what grows
	@$(BIN)/python tests/chaos/soak.py --seed $(CHAOS_SEED) --requests $(SOAK_REQUESTS) $(SOAK_FLAGS)

chaos-sim: $(VENV)/.installed-dev ## Break a simulated fleet by CHAOS_SEEDS seeds, and check that its index tells the truth
	@$(BIN)/baton simulate --chaos $(CHAOS_SEED) --chaos-seeds $(CHAOS_SEEDS)

search-constraints: $(VENV)/.installed-dev ## Search CONSTRAINT_SEEDS random regexes, grammars and schemas for one that costs too much
	@CONSTRAINT_SEEDS=$(CONSTRAINT_SEEDS) $(BIN)/python -m pytest -q tests/worker/sampling/grammar/test_grammar_bounds.py $(PYTEST_FLAGS)

hostile: $(VENV)/.installed-dev ## Send HOSTILE_CASES hostile requests to a fleet by HOSTILE_SEED; what they cost, and the table
	@$(BIN)/baton bench hostile --cases $(HOSTILE_CASES) --seed $(HOSTILE_SEED) $(HOSTILE_FLAGS)

clean: ## Remove everything that make made
	rm -rf $(VENV) $(PROTO_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf examples/node/node_modules tests/gateway/browser/node_modules tests/deploy/crds/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The theme prints advice about its successor, unless it is told not to.
build_site = NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# $(1): the folder that takes the generated code. An old compiler, so that one output loads on protobuf 5.29 to 7.
define generate
$(PROTO_VENV)/bin/python -m grpc_tools.protoc -Iproto --python_out=$(1) --grpc_python_out=$(1) \
  --plugin=protoc-gen-mypy=$(PROTO_VENV)/bin/protoc-gen-mypy \
  --plugin=protoc-gen-mypy_grpc=$(PROTO_VENV)/bin/protoc-gen-mypy_grpc \
  --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)
endef

$(VENV)/bin/python:
	@test -n "$(PYTHON)" && $(PYTHON) -c '$(SUPPORTED)' || \
	  { echo "Baton needs Python 3.11, 3.12 or 3.13, and $(or $(PYTHON),what is on the PATH) is none (make PYTHON=/path/to/python)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(PIP) '$(TORCH)'
	$(PIP) --editable '.[all]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable '.[dev]'
	@touch $@

$(PROTO_VENV)/.installed: | $(VENV)/bin/python
	$(BIN)/python -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check grpcio-tools==1.71.2 mypy-protobuf==3.6.0
	@touch $@
