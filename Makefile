# `make` alone lists the targets. Everything is installed into .venv.  Outside of this folder are caches alone (pip, kernels).

VENV  := .venv
READY := $(VENV)/.ready
CLIENTS := $(VENV)/.clients
PY    := $(VENV)/bin/python

# The first of these that starts and is new enough (a pyenv shim may exist and yet not start).
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

ARGS       ?=#  more options for `make train`, e.g. ARGS="--steps 50"
PIP_FLAGS  ?=#  more options for pip, e.g. PIP_FLAGS="--extra-index-url URL"
TORCH      ?=#  a version of torch in place of the one set-up would choose
VENV_FLAGS ?=#  more options for venv, e.g. VENV_FLAGS=--system-site-packages
TEST_ARGS  ?=#  more options for pytest, e.g. TEST_ARGS="-k train -x"
CORES      := $(shell nproc 2>/dev/null || echo 1)
WORKERS    ?= $(shell echo $$(( $(CORES) < 8 ? $(CORES) : 8 )))

# Where it is set, hundreds of short processes would each compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup train test test-clients test-long lint docs release-check clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22
	@echo
	@echo '  ARGS="…" goes to the training program, TEST_ARGS="…" to pytest, PIP_FLAGS="…" to pip,'
	@echo '  VENV_FLAGS="…" to venv; PYTHON=… picks the interpreter (3.11 or newer), TORCH=… a version of torch.'
	@echo '  With an NVIDIA GPU, set-up takes the CuPy and torch that its driver can run; notes/setup.md says how to overrule it.'
	@echo '  Options of the training program: make train ARGS=--help'

setup: $(READY)  ## create .venv and install into it (done by the other targets too)
	@echo "set-up: $(VENV) is ready"

SET_UP = $(PYTHON) scripts/setup_env.py --venv $(VENV) --venv-flags="$(VENV_FLAGS)" --pip-flags="$(PIP_FLAGS)" --torch="$(TORCH)"

$(READY): pyproject.toml constraints.txt scripts/setup_env.py
	@test -n "$(PYTHON)" || { echo "set-up: no Python 3.11 or newer found; install one or pass PYTHON=/path/to/python3"; exit 1; }
	@$(SET_UP)
	@touch $@

$(CLIENTS): $(READY)
	@$(SET_UP) --extras=clients,timm,docs
	@touch $@

train: $(READY)  ## train a GPT with torch's AdamW, PagedAdamW, and PagedAdamW on a budget: a minute
	@$(PY) -m pagedopt train $(ARGS)

# One thread per worker: the workers are the parallelism. With worksteal a file stays with one worker while it can.
test: $(READY)  ## run the tests
	@echo "test: takes 5 to 10 minutes on two cores"
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal -m "not long and not clients" $(TEST_ARGS)

test-clients: $(CLIENTS)  ## install transformers, accelerate, lightning, peft and timm, train with each, and build the site
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal -m "clients and not long" \
		-o testpaths="tests/clients tests/test_install.py" $(TEST_ARGS)

test-long: $(READY)  ## run all tests, and interrupt at every line; PAGEDOPT_SLICE=0 to 19: a part of the long ones alone
	OMP_NUM_THREADS=1 PAGEDOPT_EVERY_LINE=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal --timeout 3600 $(TEST_ARGS)

lint: $(READY)  ## ruff, mypy, and the contract of who imports whom
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-cache --no-logo

docs: $(CLIENTS)  ## build the site of README, notes and docstrings into build/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

release-check: $(READY)  ## fail unless README and usage quote numbers of one commit and of this code; needs the history
	$(PY) -m experiments release_check

clean:  ## remove .venv, caches and builds (runs/ stays)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find pagedopt tests scripts experiments -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
