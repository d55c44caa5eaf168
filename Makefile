# Every target is a short call; what it does lives in the module it names.
.DEFAULT_GOAL := help
SHELL := /bin/bash
UV ?= $(shell command -v uv || echo build/uv/bin/uv)
RUN = $(UV) run --quiet
# torch takes 5 GB: the tests that train live in an environment of their own.
RUN_TORCH = UV_PROJECT_ENVIRONMENT=.venv-torch $(UV) run --quiet
NARROW = not integration and not e2e and not chaos and not torch and not gpu
# A Python that has torch already, in place of .venv-torch: `make test-gpu PYTHON=python3`.
PYTHON ?=
RUN_GPU = $(if $(PYTHON),PYTHONPATH=$(CURDIR)/trainer-image/src:$(CURDIR)$(addprefix :,$(PYTHONPATH)) $(PYTHON),$(RUN_TORCH) python)
UNIT = -m "$(NARROW)"
# Workers of pytest: a core each. Tests start processes of their own, and eight workers of them fill 32 GB.
CORES := $(shell nproc 2>/dev/null || echo 2)
WORKERS ?= $(shell echo $$(( $(CORES) < 2 ? 2 : $(CORES) > 8 ? 8 : $(CORES) )))
HALF = $(shell echo $$(( $(WORKERS) < 4 ? 2 : $(WORKERS) / 2 )))
TIERS = $(MAKE) --no-print-directory --keep-going
# Where compiled modules may not be kept, each process compiles a thousand of them anew: half of a run of the tests.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help
help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

.PHONY: demo test test-gpu bench bench-gpu bench-checkpoint bench-pipeline bench-recovery bench-peers bench-month bench-operator lint docs types test-unit test-torch test-integration test-e2e test-chaos
demo: venv ## from nothing to a trained model on a cluster on this machine
	UV=$(UV) $(RUN) python -m e2e.demo

# The two tiers that wait in turn, for a store or an API server, run side by side, with half of the workers each.
test: ## everything that must hold before a change lands; a tier that fails does not hide what the later ones say
	+@status=0; \
	$(TIERS) lint docs types test-unit || status=1; \
	$(TIERS) -j 2 --output-sync=target WORKERS=$(HALF) test-torch test-integration || status=1; \
	$(TIERS) test-e2e || status=1; \
	exit $$status

lint: venv ## style, import directions, names and sizes
	$(RUN) ruff check . && $(RUN) ruff format --check . && $(RUN) lint-imports
	$(RUN) pytest tests/project -m "$(NARROW)" -q

# A link or an anchor that leads nowhere fails the build.
docs: $(UV) ## the documentation as a site with search, in build/site
	NO_MKDOCS_2_WARNING=1 $(UV) run --quiet --no-project --with-requirements docs/requirements.txt mkdocs build --strict

types: venv venv-torch ## mypy --strict; what works on tensors once more with torch's own types
	$(RUN) mypy
	$(RUN_TORCH) mypy --config-file mypy-torch.ini

# One worker more than cores fills the waits of the others, a second one only imports everything once more.
test-unit: venv ## seconds, no root, no cluster
	$(RUN) pytest tests $(UNIT) -n $$(( $(WORKERS) + 1 )) --dist worksteal -q

test-torch: venv-torch ## the trainer library with real torch ranks, no root, no cluster
	$(RUN_TORCH) pytest tests -m "torch and not chaos and not gpu" -n $(WORKERS) --dist worksteal -q

test-gpu: $(if $(PYTHON),,venv-torch) ## state on NVIDIA GPUs, for real; fails where there is none (PYTHON=python3: one that has torch)
	$(RUN_GPU) -m tests.gpu $(ARGS)

test-integration: venv ## the operator against a real API server, checkpoints on a real S3 server
	$(RUN) pytest tests -m "integration and not chaos" -n $(WORKERS) --dist worksteal -q

test-e2e: venv ## real pods on a real cluster, brought up if there is none
	$(RUN) pytest e2e/scenarios tests -m "e2e and not chaos" -q

test-chaos: venv venv-torch ## long sweeps, random or of all cases
	$(RUN) pytest tests -m "hypothesis and $(NARROW)" --hypothesis-profile=long --timeout 1200 -n $(WORKERS) -q
	$(RUN) pytest e2e/scenarios tests -m "chaos and not torch" -q
	$(RUN_TORCH) pytest tests -m "chaos and torch and not gpu" -n $(WORKERS) -q

bench: venv ## ratios against floors of the same run, build/bench/main.json
	$(RUN) python -m benchmarks.main

bench-checkpoint: venv-torch ## saving and restoring against plain copies, writes and reads, build/bench/checkpoint.json (ARGS="stall --size 1g": some)
	$(RUN_TORCH) python -m benchmarks.checkpoint $(ARGS)

bench-recovery: venv ## what breaks on a real cluster, until all ranks train again, build/bench/recovery.json (ARGS="node-killed": some)
	$(RUN) python -m benchmarks.recovery $(ARGS)

bench-peers: venv ## everstep beside Indexed Jobs, JobSet, Kubeflow Trainer and mpi-operator on one cluster, build/bench/peers.json (ARGS="start-4": some)
	$(RUN) python -m benchmarks.peers $(ARGS)

bench-operator: venv ## processor time of the operator for each pod, by part, on a generated cluster, build/bench/operator-profile.json (ARGS="1x1000")
	$(RUN) python -m benchmarks.operator_profile $(ARGS)

bench-month: venv ## four weeks of reclaimed nodes, simulated, build/bench/month.json
	$(RUN) python -m benchmarks.spot_month $(ARGS)

bench-gpu: $(if $(PYTHON),,venv-torch) ## stall, restore and cost of training on a GPU against plain copies, build/bench/gpu.json (ARGS="--size 1000000000")
	$(RUN_GPU) -m benchmarks.gpu $(ARGS)

bench-pipeline: venv-torch ## pipelines against closed forms, torch's pipelines and other splits, build/bench/pipeline.json (ARGS="bubble memory": some)
	$(RUN_TORCH) python -m benchmarks.pipeline $(ARGS)

.PHONY: cluster-up cluster-down images generate fmt clean venv venv-torch
cluster-up: venv ## a cluster of three nodes on this machine, images loaded, chart installed
	$(RUN) python -m e2e.demo --only-cluster

cluster-down: venv ## leaves nothing behind
	$(RUN) python -m e2e.cluster down

images: venv ## build the trainer's, the operator's and the test images
	$(RUN) python -m e2e.images build

generate: venv ## CRDs and reference pages from the models
	$(RUN) python -m everstep_operator.api.crdgen && $(RUN) python -m everstep_operator.api.docgen
	cp crds/*.yaml charts/everstep/files/crds/

fmt: venv ## format
	$(RUN) ruff check --fix . ; $(RUN) ruff format .

clean: ## what was built here (caches outside the tree stay)
	rm -rf build dist .venv .venv-torch .mypy_cache .ruff_cache .pytest_cache .hypothesis

venv: .venv/.synced

.venv/.synced: pyproject.toml uv.lock | $(UV)
	$(UV) sync --quiet --frozen --compile-bytecode --extra operator --extra dev && touch $@

venv-torch: .venv-torch/.synced

.venv-torch/.synced: pyproject.toml uv.lock | $(UV)
	UV_PROJECT_ENVIRONMENT=.venv-torch $(UV) sync --quiet --frozen --extra operator --extra dev --extra trainer --group torch-tests && touch $@

build/uv/bin/uv:
	python3 -m venv build/uv && build/uv/bin/pip install --quiet uv
