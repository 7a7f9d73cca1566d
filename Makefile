# make bench | make test | make lint: each makes its own .venv from nothing first.
# make sweep: all tests; `make test` leaves those marked `sweep` out, which show the same behaviours
# over many more models, backends and layouts.
# make docs: the documentation as a site in build/docs; a broken link is an error.
# make integrations: the tests with transformers' Trainer, accelerate, Lightning, TRL and PEFT, which
# it installs first.
# make test-versions: contract and smoke tests on every supported PyTorch and Python that can be
# had, each in an environment of its own; PAIRS="2.15:3.13" names some, PYTHONS=/opt/pythons:... says
# where interpreters are.
#
# PYTHON  the interpreter to make .venv with
# TORCH   the torch to install where that interpreter has none in the supported range; today's, if
#         not said
# JOBS    how many processes run the tests
# ARGS    further arguments of pytest or of `lazyinline bench`: make test ARGS="-k golden -x"

PYTHON ?= python3
TORCH ?= $(shell sed -n 's/^  "\(torch>=[^"]*\)",$$/\1/p' pyproject.toml)
JOBS ?= 2
ARGS ?=
PAIRS ?=

SHELL := bash
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
INTEGRATIONS := $(VENV)/.integrations
DOCS := $(VENV)/.docs

.PHONY: bench test sweep integrations test-versions lint docs

bench: $(STAMP)
	@$(VENV)/bin/lazyinline bench $(ARGS)

test: $(STAMP)
	@$(PY) -m pytest -q --numprocesses $(JOBS) --dist worksteal $(ARGS)

sweep: override ARGS += --sweep
sweep: test

integrations: $(INTEGRATIONS)
	@$(PY) -m pytest -q --numprocesses $(JOBS) --dist worksteal tests/integrations $(ARGS)

docs: $(DOCS)
	@$(PY) -m sphinx -q --fail-on-warning --keep-going -d build/doctrees docs build/docs
	@echo "build/docs/index.html"

test-versions:
	@$(PYTHON) tests/run_versions.py $(PAIRS)

# All three run, whatever the others find. mypy reads the package through the links, and its
# messages name the files behind them.
lint: $(STAMP)
	@$(PY) tests/link_tree.py
	@set -o pipefail; status=0; \
	$(PY) -m ruff check --quiet . || status=1; \
	$(PY) -m ruff format --check --quiet --diff . || status=1; \
	$(PY) -m mypy | sed 's|^build/lint/lazyinline/||' || status=1; \
	exit $$status

# Exits with 0 if the interpreter that runs it has a torch in the range that pyproject.toml names.
# "new" makes it ask whether a new .venv would inherit that torch: what an active virtual
# environment holds, a .venv made from it does not see.
define HAS_TORCH
import importlib.metadata, re, sys
spec = re.search(r'"torch>=([\d.]+),<([\d.]+)"', open("pyproject.toml").read()).groups()
low, high = (tuple(map(int, bound.split("."))) for bound in spec)
try:
    version = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    sys.exit(1)
inherited = "new" not in sys.argv or sys.prefix == sys.base_prefix
found = tuple(map(int, re.findall(r"\d+", version)[:2]))
sys.exit(not (inherited and low <= found < high))
endef
export HAS_TORCH

# torch goes in first and alone, so that nothing else can choose another one. Every step may be
# repeated: an interrupted run is taken up where it stopped.
$(STAMP): pyproject.toml
	@if [ ! -x $(PY) ] || ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  echo "making $(VENV) (once; takes minutes where torch must be downloaded)"; \
	  if $(PYTHON) -c "$$HAS_TORCH" new; \
	  then $(PYTHON) -m venv --system-site-packages $(VENV); \
	  else $(PYTHON) -m venv $(VENV); fi; \
	fi
	@$(PY) -c "$$HAS_TORCH" || $(PY) -m pip install -qq --disable-pip-version-check "$(TORCH)"
	@$(PY) -m pip install -qq --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(INTEGRATIONS): $(STAMP)
	@$(PY) -m pip install -qq --disable-pip-version-check --editable '.[dev,integrations]'
	@touch $@

$(DOCS): $(STAMP)
	@$(PY) -m pip install -qq --disable-pip-version-check --editable '.[dev,docs]'
	@touch $@
