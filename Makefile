# Every target prepares .venv by itself, so `make demo` works in a fresh clone.
#
#   PYTHON=python3.12          the interpreter of the environment (3.11 or newer)
#   PIP_ARGS="..."             passed to every pip install, for example to name a mirror
#                              or an index that serves a build of torch for your driver
#   ARGS="-k zero -x"          passed to pytest or the demo
#   TRUTH=FOLDER               published measurements for `make validate`
#   WORKERS=2                  test processes; distributed tests start up to four ranks each

SHELL   := /bin/bash
WORKERS ?= 2
PYTHON  ?= $(shell for p in python3 python python3.14 python3.13 python3.12 python3.11; do \
             "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
             && echo "$$p" && break; done)

VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
# Whole files to a worker, in our order: what a module prepares is then prepared once.
PYTEST  := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

.PHONY: help install demo test test-all check format bench validate zoo clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo      train a small Llama on 4 local ranks and compare with one device'
	@echo 'make test      the tests (make test-all: also the slow ones)'
	@echo 'make check     ruff, formatting, mypy --strict, every test file imports'
	@echo 'make format    apply formatting and the safe fixes of ruff'
	@echo 'make bench     measure planning and memory; writes benchmarks/RESULTS.md'
	@echo 'make validate  predict published runs (TRUTH=FOLDER); writes docs/validation.md and'
	@echo '               docs/published-plans.md'
	@echo 'make zoo       run every architecture of the zoo; writes docs/zoo.md (long)'
	@echo 'make install   only prepare .venv;  make clean   remove it'

install: $(READY)

# torch goes first and alone, by its exact pin: resolving it from the `torch>=` of this
# or another package may pick a newer build with several gigabytes of CUDA libraries.
$(READY): pyproject.toml constraints.txt
	@if [ -z '$(PYTHON)' ]; then \
	  echo 'autopar needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python' >&2; \
	  exit 1; fi
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo 'Debian keeps venv in a package of its own: installing python3-venv'; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv; \
	  else \
	    echo '$(PYTHON) has no venv module; on Debian: sudo apt-get install python3-venv' >&2; \
	    exit 1; \
	  fi; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[dev,hf]'
	@touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py $(ARGS)

test: $(READY)
	$(PYTEST) -n $(WORKERS) $(ARGS)

test-all: $(READY)
	$(PYTEST) -n $(WORKERS) -m '' $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) --collect-only -q >/dev/null

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/memory_of_layouts.py
	$(BIN)/python benchmarks/memory_at_scale.py
	$(BIN)/python benchmarks/step_order.py
	$(BIN)/python benchmarks/assignment.py
	$(BIN)/python benchmarks/search.py

validate: $(READY)
	@if [ -z '$(TRUTH)' ]; then \
	  echo 'say where the tables are: make validate TRUTH=FOLDER' >&2; exit 1; fi
	$(BIN)/python benchmarks/validation/validate.py '$(TRUTH)'
	$(BIN)/python benchmarks/published_plans.py '$(TRUTH)'

# diffusers and peft give three architectures; the package itself needs neither.
zoo: $(READY)
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[zoo]'
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.zoo $(ARGS)

clean:
	rm -rf $(VENV) demo-output build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
