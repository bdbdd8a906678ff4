# Everything a developer runs. A target's comment is its help text: `make help`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

export KVOFFLOAD_CACHE ?= $(HOME)/.cache/kvoffload
UV_VERSION := 0.13.9
UV := $(or $(shell command -v uv 2>/dev/null),$(KVOFFLOAD_CACHE)/uv/bin/uv)
PYTHON := .venv/bin/python
SYNCED := .venv/.synced
PYTEST := $(PYTHON) -m pytest
STARTED := $(shell date +%s)

.PHONY: help
help: ## print this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# ---------------------------------------------------------------- set-up, by itself when needed
$(KVOFFLOAD_CACHE)/uv/bin/uv:
	python3 -m venv $(KVOFFLOAD_CACHE)/uv || \
	    { [ $$(id -u) = 0 ] || { echo "python3-venv is missing: install it, or run this as root, or with sudo" >&2; exit 1; }; \
	      apt-get update -qq && apt-get install -qq -y python3-venv && python3 -m venv --clear $(KVOFFLOAD_CACHE)/uv; }
	$(KVOFFLOAD_CACHE)/uv/bin/pip install --quiet uv==$(UV_VERSION)

$(SYNCED): pyproject.toml requirements/dev.txt $(UV)
	$(UV) venv --quiet --allow-existing .venv
	$(UV) pip sync --quiet --python $(PYTHON) --require-hashes requirements/dev.txt
	$(UV) pip install --quiet --python $(PYTHON) --no-deps --editable .
	touch $@

.PHONY: lock
lock: export UV_CUSTOM_COMPILE_COMMAND := make lock
lock: COMPILE := $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate pyproject.toml
lock: $(UV) ## pin every dependency anew, by version and hash (requirements/; no index is named there)
	$(COMPILE) --upgrade --all-extras --group dev --output-file requirements/dev.txt
	for part in operator node; do \
	    $(COMPILE) --upgrade --extra $$part --constraint requirements/dev.txt --output-file requirements/$$part.txt; done

# ---------------------------------------------------------------- see it work
.PHONY: demo demo-down
demo: $(SYNCED) ## the whole system on a real local cluster: pool, two vLLM servers, shared cache, figures
	$(PYTHON) -m hack.demo

demo-down: cluster-down ## give back everything that the demo and the cluster took from this machine

# ---------------------------------------------------------------- tests
.PHONY: test lint test-unit test-engine test-e2e test-gpu test-long bench docs generate
test: lint test-unit ## everything: lint, types, unit, property, real vLLM, real cluster (which mostly waits: beside vLLM)
	$(PYTHON) -m hack.vllm environment
	$(PYTHON) -m hack.cluster up
	$(PYTHON) -m hack.images --load
	$(PYTEST) --numprocesses=4 --dist=loadscope --no-loadscope-reorder -m "(engine or e2e) and not long and not alone" \
	    tests/e2e tests/engine
	$(PYTEST) -m "alone and (engine or e2e) and not long" tests/engine tests/e2e
	@echo "all passed, in $$(( ($$(date +%s) - $(STARTED)) / 60 )) min"

lint: $(SYNCED) ## style, types, import contracts
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/mypy -p hack -p bench
	MYPYPATH=tests .venv/bin/mypy -p e2e
	.venv/bin/lint-imports

test-unit: $(SYNCED) ## unit, property and concurrency tests (2 to 3 minutes)
	$(PYTHON) -m hack.chart
	$(PYTEST) --numprocesses=3 -m "not long and not alone" tests/unit tests/property tests/chart tests/concurrency
	$(PYTEST) -m "alone and not long" tests/concurrency

test-engine: $(SYNCED) ## a real vLLM in processes, tensor parallel size 2
	$(PYTHON) -m hack.vllm environment
	$(PYTEST) --numprocesses=2 --dist=loadfile -m "not long and not alone" tests/engine
	$(PYTEST) -m "alone and not long" tests/engine

test-e2e: $(SYNCED) ## the steps of the demo and more, asserted on the real local cluster
	$(PYTHON) -m hack.cluster up
	$(PYTEST) --numprocesses=4 --dist=loadscope --no-loadscope-reorder -m "e2e and not long and not alone" tests/e2e
	$(PYTEST) -m "alone and e2e and not long" tests/e2e

test-gpu: $(SYNCED) ## a real engine, bytes, bandwidth beside vLLM's own worker on a CUDA device; says so where there is none
	$(PYTEST) -m gpu tests/gpu

test-long: $(SYNCED) ## full kill rounds, fuzzing, a thousand nodes, the version matrix (an hour or more)
	$(PYTEST) --durations=0 -rP -m long tests

bench: $(SYNCED) ## figures beside vLLM's own manager; writes build/bench/results.json, and docs/reference/speed-*.md from it
	$(PYTHON) -m bench

generate: $(SYNCED) ## write the CRDs from the API models, and the schema of the chart's values from their comments
	$(PYTHON) -m kvoffload.api.schema crds charts/kvoffload/crds
	$(PYTHON) -m hack.docs.values_schema

docs: $(SYNCED) ## write what is generated from code, build the documentation into site/, check its links
	$(PYTHON) -m hack.docs.dashboard
	$(PYTHON) -m hack.docs.reference
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

# ---------------------------------------------------------------- parts
.PHONY: image cluster-up cluster-down env
image: $(SYNCED) ## build the operator's and the node's images
	$(PYTHON) -m hack.images

cluster-up: $(SYNCED) ## start the local cluster (built the first time); a no-op when it runs
	$(PYTHON) -m hack.cluster up

cluster-down: $(SYNCED) ## stop the local cluster and give everything back
	$(PYTHON) -m hack.cluster down

env: $(SYNCED) ## print the export lines for KUBECONFIG and PATH: eval "$(make -s env)"
	@$(PYTHON) -m hack.cluster env
