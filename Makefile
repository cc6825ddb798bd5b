# The one entry point, for people and for .ci/run. `make help` lists the targets.
#
#   PYTHON=python3.12    the interpreter .venv is made with
#   PYTEST_ARGS="-k x"   further arguments of pytest

PYTHON ?= python3
PYTEST_ARGS ?=
BUILD := build
BIN := .venv/bin

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-engines test-browser test-numa test-remote lint types docs wheel-test bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

# One environment, two steps: `demo` needs the first only. Either is taken again when the
# metadata it was installed from changes.
.venv/runtime.stamp: pyproject.toml hostmem/_version.py
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON): no such interpreter" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1)." >&2; \
	  echo "Name another one, for example: make PYTHON=python3.12 demo" >&2; exit 1; }
	@echo "making .venv (about half a minute)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --editable .
	@touch $@

.venv/dev.stamp: .venv/runtime.stamp
	@echo "adding the test and lint tools to .venv"
	@$(BIN)/python -m pip install --quiet --group dev
	@touch $@

demo: .venv/runtime.stamp  ## replay a small generated trace over gpu, host and disk tiers
	@mkdir -p $(BUILD)/demo/disk
	$(BIN)/python -m kvtier trace --seed 7 --requests 2000 --out $(BUILD)/demo/demo.jsonl
	$(BIN)/python -m kvtier replay $(BUILD)/demo/demo.jsonl --gpu-quota 16MiB --host-quota 96MiB \
	  --disk-quota 256MiB --disk-path $(BUILD)/demo/disk --block-bytes 64KiB \
	  --html $(BUILD)/demo/report.html
	@echo; echo "with pictures: $(BUILD)/demo/report.html"

test: .venv/dev.stamp  ## run the tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Engines as the index has them, without their requirements (for GPUs, gigabytes): those that their
# classes need on the CPU are the group `engines`. torch is the CPU build where pip finds one.
ENGINES := vllm==0.33.0 lmcache==0.5.6 sglang==0.5.23
ENGINE_BIN := $(BUILD)/engines/venv/bin

$(BUILD)/engines/venv/stamp: pyproject.toml Makefile
	@echo "making $(BUILD)/engines/venv (minutes: torch, and engines of some 350 MB)"
	@$(PYTHON) -m venv $(BUILD)/engines/venv
	@$(ENGINE_BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@$(ENGINE_BIN)/python -m pip install --quiet --group engines --editable .
	@$(ENGINE_BIN)/python -m pip install --quiet --no-deps $(ENGINES)
	@touch $@

test-engines: $(BUILD)/engines/venv/stamp  ## run the plug-ins against the engines' own classes
	$(ENGINE_BIN)/python -m pytest tests/engines $(PYTEST_ARGS)

# Mooncake Store with its master, on the loopback. Its wheel needs libraries for RDMA: where they
# are missing, the distribution's packages are unpacked beside it (300 KB, nothing is installed).
REMOTE := $(BUILD)/remote
REMOTE_BIN := $(REMOTE)/venv/bin
REMOTE_PACKAGES := libibverbs1 libnl-3-200 libnl-route-3-200
REMOTE_LIBRARIES := $(foreach top,lib usr/lib,$(abspath $(REMOTE))/root/$(top)/$(shell uname -m)-linux-gnu)

$(REMOTE)/venv/stamp: pyproject.toml Makefile
	@echo "making $(REMOTE)/venv (half a minute)"
	@$(PYTHON) -m venv $(REMOTE)/venv
	@$(REMOTE_BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@$(REMOTE_BIN)/python -m pip install --quiet --group remote --editable .
	@ldconfig -p | grep -q libibverbs.so.1 || { mkdir -p $(REMOTE)/root && cd $(REMOTE) && \
	  apt-get download -qq $(REMOTE_PACKAGES) && \
	  for each in *.deb; do dpkg-deb --extract $$each root; done; } || \
	  echo "libibverbs is not installed and apt has none here: the tests say so" >&2
	@touch $@

empty :=
test-remote: $(REMOTE)/venv/stamp  ## run the remote level against a real Mooncake Store
	LD_LIBRARY_PATH=$(subst $(empty) $(empty),:,$(REMOTE_LIBRARIES)):$$LD_LIBRARY_PATH \
	  $(REMOTE_BIN)/python -m pytest tests/remote $(PYTEST_ARGS)

# A guest with two memory nodes and one without CPUs, in an emulator; packages of Debian or
# Ubuntu are fetched for it the first time (45 MB into build/guest, nothing is installed).
test-numa: .venv/dev.stamp  ## run the tests of memory nodes and control groups in a guest
	$(BIN)/python -m tests.guest $(PYTEST_ARGS)

test-browser: .venv/dev.stamp  ## look at the pages that are made, in a browser that is fetched if need be
	$(BIN)/python -m tests.browser $(PYTEST_ARGS)

lint: .venv/dev.stamp  ## check style and format (ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev.stamp  ## check the types (mypy, strict)
	$(BIN)/mypy

# An environment of its own: what is installed for the docs takes no part in the tests.
$(BUILD)/docs-venv/stamp: pyproject.toml hostmem/_version.py
	@echo "making $(BUILD)/docs-venv (a quarter of a minute)"
	@$(PYTHON) -m venv $(BUILD)/docs-venv
	@$(BUILD)/docs-venv/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	@$(BUILD)/docs-venv/bin/python -m pip install --quiet --group docs --editable .
	@touch $@

# From nothing each time, or the warnings of pages that did not change would not be seen.
docs: $(BUILD)/docs-venv/stamp  ## make the documentation, build/docs/index.html; warnings are errors
	@$(BUILD)/docs-venv/bin/python -m sphinx -b html -n -W --keep-going -E -q docs $(BUILD)/docs
	@echo "$(BUILD)/docs/index.html"

wheel-test: .venv/dev.stamp  ## build the wheel, install it elsewhere, import it
	$(BIN)/python -m pytest -m wheel $(PYTEST_ARGS)

# One after the other, so that they do not measure each other.
BENCHES := $(filter-out __init__ contention gpu leaving measure pages peers probe product rank remote \
  stalls tier,\
  $(basename $(notdir $(wildcard bench/*.py))))

bench: .venv/runtime.stamp  ## run every benchmark that needs no GPU
	@set -e; for name in $(BENCHES); do echo "== bench.$$name"; $(BIN)/python -m bench.$$name; done

clean:  ## remove what was built, .venv included
	rm -rf .venv $(BUILD) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find hostmem kvtier tests bench -name __pycache__ -prune -exec rm -rf {} +
