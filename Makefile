# Everything runs from .venv, made from requirements/dev.lock on first use.
# Needed beforehand: make, and a Python of at least 3.11 with its venv module.

PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.stamp
TEST    = $(BIN)/python -m pytest
LOCAL  := .venv/.local
UV     ?= $(BIN)/uv
LOCK    = $(UV) pip compile -q --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-annotate --no-header

# Others' benchmark clients, and a real vLLM, have an environment each, made on first use or named by a
# variable. That of vLLM is locked for this Python, on Linux.
AIPERF := $(or $(HEADRACE_AIPERF),build/aiperf)
VLLM   := $(or $(HEADRACE_VLLM),build/vllm)
VLLM_PYTHON ?= python3.11

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo local test coverage test-engines test-vllm test-judges check lint types imports tidy bench lock \
	clean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

define need_python
command -v "$(PYTHON)" >/dev/null || \
	{ echo "No '$(PYTHON)' here. Name one: make PYTHON=/path/to/python3 ..." >&2; exit 1; }; \
"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "Headrace needs Python 3.11 or newer; '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1)." \
	"Name another: make PYTHON=python3.12 ..." >&2; exit 1; }; \
"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
	{ echo "'$(PYTHON)' lacks its venv module; on Debian, install python3-venv." >&2; exit 1; }
endef

# An environment that is there is brought up to date in place, so that others may keep using it.
$(STAMP): requirements/dev.lock pyproject.toml
	@$(need_python)
	@test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install -q --require-hashes -r requirements/dev.lock
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	@touch $@

# Two wheels of 100 MB each, for whoever asks for them: no other target needs them.
$(LOCAL): requirements/local.lock $(STAMP)
	$(BIN)/python -m pip install -q --no-deps --require-hashes -r requirements/local.lock
	@touch $@

demo: $(STAMP) ## Show what Headrace does, on emulated replicas
	$(BIN)/headrace demo

local: $(LOCAL) ## Serve a small real model on this machine
	$(BIN)/headrace serve --local

# Those before real servers go one by one: they time, and would hear each other.
test: $(STAMP) ## Run the tests
	$(TEST) -n auto --maxprocesses 4 --dist worksteal -m "not service"
	$(TEST) -m service

coverage: TEST = $(BIN)/python -m coverage run -m pytest
coverage: $(STAMP) ## Run them twice as slowly, then print which lines no test reached
	$(BIN)/python -m coverage erase
	$(MAKE) test TEST="$(TEST)"
	$(BIN)/python -m coverage report

test-engines: $(LOCAL) ## Run the tests before a real engine, llama.cpp (HEADRACE_SOAK_S=1800: soak longer)
	HEADRACE_SOAK_S=$${HEADRACE_SOAK_S-120} \
	HEADRACE_TEST_REQUIRE=$${HEADRACE_TEST_REQUIRE:+$$HEADRACE_TEST_REQUIRE,}llamacpp \
		$(BIN)/python -m pytest tests/conformance tests/e2e/test_llamacpp.py \
		tests/e2e/test_local.py tests/e2e/test_groups.py tests/e2e/test_scaling.py

$(VLLM)/.stamp: requirements/vllm.lock requirements/vllm-torch.txt
	"$(VLLM_PYTHON)" -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install -q --no-cache-dir --no-deps -r requirements/vllm-torch.txt
	$(VLLM)/bin/python -m pip install -q --no-cache-dir --no-deps --require-hashes -r requirements/vllm.lock
	$(VLLM)/bin/python -c "import torch; v = torch.__version__; assert v.endswith('+cpu'), v"
	@touch $@

test-vllm: $(STAMP) $(VLLM)/.stamp ## Run the tests that need a real vLLM; installs it, 2 GB, on first use
	HEADRACE_VLLM="$(abspath $(VLLM))" \
	HEADRACE_TEST_REQUIRE=$${HEADRACE_TEST_REQUIRE:+$$HEADRACE_TEST_REQUIRE,}vllm \
		$(BIN)/python -m pytest -m vllm

# Most of what aiperf brings is for what is not asked of it here; pip resolves nothing.
$(AIPERF)/.stamp: requirements/aiperf.lock
	@$(need_python)
	"$(PYTHON)" -m venv --clear $(AIPERF)
	$(AIPERF)/bin/python -m pip install -q --no-cache-dir --no-deps --require-hashes -r requirements/aiperf.lock
	@touch $@

test-judges: $(STAMP) $(AIPERF)/.stamp $(VLLM)/.stamp ## Hold our figures against aiperf's and vLLM's; installs both on first use
	HEADRACE_AIPERF="$(abspath $(AIPERF))" HEADRACE_VLLM="$(abspath $(VLLM))" \
	HEADRACE_TEST_REQUIRE=$${HEADRACE_TEST_REQUIRE:+$$HEADRACE_TEST_REQUIRE,}aiperf,vllm-bench \
		$(BIN)/python -m pytest -m judge --log-cli-level=INFO tests/judges

check: lint types imports tidy ## Run the four static checks

lint: $(STAMP) ## Check format and lint rules
	$(BIN)/ruff format --check
	$(BIN)/ruff check

types: $(STAMP) ## Check types
	$(BIN)/python -m mypy

imports: $(STAMP) ## Check which room may import which
	$(BIN)/lint-imports --no-logo

tidy: $(STAMP) ## Check the house style that no linter knows
	$(BIN)/python -m pytest -q tests/tidy

bench: $(STAMP) ## Run every benchmark, in its quick form
	$(BIN)/python -m benchmarks all --quick

lock: ## Pin what requirements/*.in name (UPGRADE=1: to the newest)
	@test -x "$$(command -v $(UV))" || $(MAKE) $(STAMP)
	$(LOCK) $(if $(UPGRADE),--upgrade) requirements/run.in -o requirements/run.lock
	$(LOCK) $(if $(UPGRADE),--upgrade) requirements/dev.in -o requirements/dev.lock
	$(LOCK) $(if $(UPGRADE),--upgrade) --no-deps requirements/local.in -o requirements/local.lock
	$(LOCK) $(if $(UPGRADE),--upgrade) requirements/aiperf.in -o requirements/aiperf.lock
	$(filter-out --universal,$(LOCK)) $(if $(UPGRADE),--upgrade) \
		--excludes requirements/vllm-excludes.txt requirements/vllm.in -o requirements/vllm.lock

clean: ## Remove what the other targets made, .venv included
	rm -rf .venv build/aiperf build/vllm .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis \
		.coverage .coverage.* dist reports
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
