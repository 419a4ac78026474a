# Everything from a fresh clone: `make up`, `make test`. `make help` lists the rest.
#
# PREFILL, DECODE  number of workers      PORT  of the router      MODEL  directory or name
# ARGS             passed on: further flags of `hawk up`, pytest or the benchmark
# PYTHON           a CPython 3.11         PYTHON_TTNN  a CPython 3.12 or 3.10, for .venv-ttnn
# PIP_EXTRA_INDEX_URL                     one more package index for pip

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help env env-dev env-ttnn model up test test-unit test-integration e2e vm ttnn lint format bench \
        bench-transfer bench-decode bench-serve doctor smoke lock clean

# The environment is installed without byte code, which is twice as fast; the first import of a module writes it.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
TESTS := $(BIN)/python -m pytest
UP_FLAGS = $(if $(PREFILL),--prefill $(PREFILL)) $(if $(DECODE),--decode $(DECODE)) $(if $(PORT),--port $(PORT)) \
           $(if $(MODEL),--model $(MODEL))

help: ## this list
	@grep -hE '^[a-z][a-z0-9-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

up: model ## start a router, PREFILL=1 prefill and DECODE=1 decode workers on PORT=8000; Ctrl-C stops all
	@exec $(BIN)/hawk up $(UP_FLAGS) $(ARGS)

env: ## the Python environment in .venv, from the lock
	@deploy/env.sh runtime

env-dev: ## the same, with test and lint tools
	@deploy/env.sh dev

env-ttnn: ## the environment of a decode node with Tenstorrent cards, and of their simulator, in .venv-ttnn
	@deploy/env.sh ttnn

model: env ## the default model, converted once
	@$(BIN)/hawk model pull >/dev/null

# Without a Python for .venv-ttnn the tests that need it skip, and say so; HAWK_REQUIRE=ttnn makes that a failure.
test: env-dev model ## all tests
	@deploy/env.sh ttnn || true
	$(TESTS) $(ARGS)

test-unit: env-dev ## unit tests: no model, no processes
	$(TESTS) tests/unit $(ARGS)

test-integration: env-dev model ## tests of several parts together
	$(TESTS) tests/integration $(ARGS)

e2e: env-dev model ## tests with real roles, vLLM and a real model
	HAWK_REQUIRE=e2e $(TESTS) -m e2e $(ARGS)

vm: env-dev ## tests over RDMA, in QEMU guests (needs the packages that tests/vm/install takes)
	HAWK_REQUIRE=vm $(TESTS) -m vm $(ARGS)

ttnn: env-dev env-ttnn ## tests on Tenstorrent's simulated and mock devices
	HAWK_REQUIRE=ttnn $(TESTS) -m ttnn $(ARGS)

lint: env-dev ## ruff, and mypy --strict on transport
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: env-dev ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: bench-transfer bench-decode bench-serve ## all benchmarks

bench-transfer: env ## KV transfer: GG-Direct, GN-HAWK, GG-Host, GN-Host
	$(BIN)/hawk bench transfer $(ARGS)

bench-decode: env model ## the decode engine against vLLM's
	$(BIN)/hawk bench decode $(ARGS)

bench-serve: env model ## the three roles against the same vLLM alone
	$(BIN)/hawk bench serve $(ARGS)

doctor: env ## check this machine and the installation
	@$(BIN)/hawk doctor $(ARGS)

smoke: ## curl against a running router: PORT=8000
	@deploy/smoke.sh http://127.0.0.1:$(or $(PORT),8000)

lock: env ## hashes of deploy/requirements/*.in into *.txt
	$(BIN)/python deploy/requirements/compile.py

clean: ## remove what was made in this directory: environment, model, logs, caches
	rm -rf .venv .venv-ttnn .hawk build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
