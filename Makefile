# Everything a newcomer needs is `make demo` and `make test`; both install what they need into $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TEST_PROCESSES ?= 2
TORCH := torch==2.13.0
PROTOS := $(wildcard protos/shoal/v1/*.proto)
PROTOC_VENV := .cache/protoc-venv
# KEDA's contract is compiled as a file of the folder in which its stubs lie, so that they import each other from there.
KEDA := services/scheduler/externalscaler
PROTOC := $(PROTOC_VENV)/bin/python -m grpc_tools.protoc -I protos -I $(KEDA)=protos/externalscaler --plugin=protoc-gen-mypy_grpc=$(PROTOC_VENV)/bin/protoc-gen-mypy_grpc
STUBS = --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1)
# Packages whose models are held against ours; they ask for older versions of what they share with us, and run with ours.
REFERENCES := gliner gliclass glirel loguru seqeval
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test check protos models-table bench bench-families bench-lora bench-plan bench-swap bench-infinity clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

demo: $(VENV)/.demo ## Start the mesh, search, rerank and classify real text with a real model, and stop
	$(BIN)/python examples/demo.py

test: $(VENV)/.dev ## Run the tests (real redis-server, real gRPC, a real model)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(VENV)/.dev $(PROTOC_VENV)/.done ## Lint, types, protos, import rules, generated code is current
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests benchmarks examples
	$(BIN)/buf lint
	$(BIN)/lint-imports
	$(BIN)/python -m libs.catalog.coverage --check
	@rm -rf .cache/protos && mkdir -p .cache/protos
	@$(PROTOC) $(call STUBS,.cache/protos) $(PROTOS)
	@$(PROTOC) $(call STUBS,.cache/protos) $(KEDA)/externalscaler.proto
	@for made in .cache/protos/shoal/v1/*; do cmp $$made libs/api/shoal/v1/$$(basename $$made) || { echo "generated code is stale: run make protos"; exit 1; }; done
	@for made in .cache/protos/$(KEDA)/*; do cmp $$made $(KEDA)/$$(basename $$made) || { echo "generated code is stale: run make protos"; exit 1; }; done
	@echo "generated code is current"

protos: $(PROTOC_VENV)/.done ## Generate libs/api/shoal/v1 and services/scheduler/externalscaler from protos/
	$(PROTOC) $(call STUBS,libs/api) $(PROTOS)
	$(PROTOC) $(call STUBS,.) $(KEDA)/externalscaler.proto

models-table: $(VENV)/.dev ## Generate docs/models.md and the schema of cards from libs/catalog
	$(BIN)/python -m libs.catalog.coverage

bench: $(VENV)/.dev ## Measure the mesh against sentence-transformers (and Infinity, see docs/benchmarks.md)
	$(BIN)/python -m benchmarks.mesh $(ARGS)

bench-families: $(VENV)/.dev ## Measure every family's packed forward against transformers and sentence-transformers
	$(BIN)/python -m benchmarks.families $(ARGS)

bench-lora: $(VENV)/.dev ## Measure what LoRA adapters cost, one and eight in a batch
	$(BIN)/python -m benchmarks.lora $(ARGS)

bench-swap: $(VENV)/.dev ## Measure how long a model takes from disk and from host memory to its first vector
	$(BIN)/python -m benchmarks.swap $(ARGS)

bench-plan: $(VENV)/.dev ## Measure how long a plan takes for many models and workers
	$(BIN)/python -m benchmarks.plan $(ARGS)

bench-infinity: ## Install Infinity into an environment of its own, so that `make bench` measures it too
	PYTHON=$(PYTHON) benchmarks/setup_infinity.sh

clean: ## Remove what the other targets made
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build libs/api/build *.egg-info libs/api/*.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch by its exact version and first: a range would bring gigabytes of CUDA libraries.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	@echo "installing torch (once; see constraints.txt)"
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.demo: pyproject.toml libs/api/pyproject.toml $(VENV)/.torch
	@echo "installing the mesh"
	$(PIP) -e libs/api -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "installing test and check tools"
	$(PIP) -e libs/api -e '.[dev]'
	$(PIP) --no-deps $(REFERENCES)
	@touch $@

# Stubs made by an old grpcio-tools run with every newer grpcio and protobuf; a newer one's would not run with older ones.
$(PROTOC_VENV)/.done: Makefile
	$(PYTHON) -m venv $(PROTOC_VENV)
	$(PROTOC_VENV)/bin/python -m pip --disable-pip-version-check install -q grpcio-tools==1.62.3 mypy-protobuf==3.6.0 'setuptools<81'
	@touch $@
