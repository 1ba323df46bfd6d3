# Needs make and Python 3.11 or newer; everything else goes into .venv on first use.
#   make demo    trains a small GPT in a two-process pipeline, about a minute
#   make test    format, types, tests, and the site of the manual
#   make docs    the site of the manual, in site/
#   make test-newest, test-lightning-main    the tests with the newest of what we need
VENV   ?= .venv
WORKERS ?= 4
PYTHON ?= python3 python3.14 python3.13 python3.12 python3.11
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.lightning-pipes-installed
PINS   ?= -c constraints.txt
NEWEST ?= .venv-newest
MAIN   ?= .venv-lightning-main
LIGHTNING_MAIN ?= git+https://github.com/Lightning-AI/pytorch-lightning
# Tests start many interpreters, and wait for most of the time: with compiled modules, several files of tests at once.
PYTEST := PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# The tests with these arguments, and mypy beside them on the cores that they leave; either fails the recipe.
with_types = $(PY) -m mypy >$(VENV)/mypy.txt 2>&1 & types=$$!; trap "kill $$types 2>/dev/null" EXIT; \
	$(PYTEST) $(1); tests=$$?; wait $$types; types=$$?; trap - EXIT; \
	[ $$types = 0 ] || cat $(VENV)/mypy.txt; [ $$tests$$types = 00 ]
# What we hardly import, half of all: compiled when it is.
RARE   := /(tests?|transformers/models|pip|mypy|networkx|fontTools|pygments/lexers|torch/(_inductor|testing))/
USABLE := 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))'

.DEFAULT_GOAL := help
.PHONY: help demo docs ray postgresql test test-full test-newest test-lightning-main bench format lint install clean

help:
	@echo "make demo       train a small GPT in a pipeline of two processes and draw its timeline, about a minute"
	@echo "make test       format, types, tests, docs   (ARGS='-k kfkb' goes to pytest)"
	@echo "make test-full  the same with the slow tests"
	@echo "make test-newest  the tests with the newest torch and lightning that can be had, in $(NEWEST)"
	@echo "make test-lightning-main  the same with Lightning's main branch, in $(MAIN)"
	@echo "make docs       the site of the manual, in site/; a broken link or a missing name fails"
	@echo "make bench      every benchmark in its short form"
	@echo "make lint       format and types only"
	@echo "make clean      remove .venv and everything that was made"

demo: $(STAMP)
	@$(PY) examples/train.py $(ARGS)

test: format docs
	@$(call with_types,-m "not slow" $(ARGS))

test-full: format docs ray postgresql
	@$(call with_types,$(ARGS))

ray: $(STAMP)
	@$(PY) -c 'import ray.train' 2>/dev/null || $(PY) -m pip install --quiet --disable-pip-version-check $(PINS) -e '.[ray]' \
	  || echo "Ray can't be installed, so its tests are skipped"

postgresql: $(STAMP)   # the tests of a study in PostgreSQL are skipped if it can't be installed
	@$(PY) -c 'import psycopg' 2>/dev/null || $(PY) -m pip install --quiet --disable-pip-version-check $(PINS) 'psycopg[binary]' \
	  || echo "psycopg can't be installed"
	@command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 \
	  || { [ "$$(id -u)" = 0 ] && apt-get install --yes -qq postgresql >/dev/null; } \
	  || echo "PostgreSQL is not installed; on Debian and Ubuntu: apt install postgresql"

test-newest:
	@$(MAKE) --no-print-directory test-in VENV=$(NEWEST) PINS= UPGRADE="--upgrade --upgrade-strategy eager -e .[dev]" ARGS='$(ARGS)'

test-lightning-main:   # another directory: LIGHTNING_MAIN=/path/to/pytorch-lightning
	@$(MAKE) --no-print-directory test-in VENV=$(MAIN) UPGRADE="--upgrade --no-deps $(LIGHTNING_MAIN)" ARGS='$(ARGS)'

test-in: $(STAMP)
	@$(PY) -m pip install --quiet --disable-pip-version-check $(UPGRADE)
	@$(PY) -m pip list --disable-pip-version-check 2>/dev/null | grep -iE '^(torch|lightning|hydra-core|optuna|numpy|transformers) '
	@$(PYTEST) -m "not slow" $(ARGS)

format: $(STAMP)
	@$(PY) -m ruff format --check --quiet . || { echo "some files are not formatted; run: $(PY) -m ruff format ."; exit 1; }
	@$(PY) -m ruff check .

lint: format
	@$(PY) -m mypy

bench: $(STAMP)
	@for file in $$(grep -l 'make_parser(\|"--quick"' benchmarks/*.py); do echo; echo "== $$file"; $(PY) $$file --quick || exit 1; done
	@for paper in kfkb jap umpipe csp dynpipe; do echo; echo "== $$paper"; $(PY) -m benchmarks.papers $$paper --quick || exit 1; done

docs: $(STAMP)   # NO_MKDOCS_2_WARNING: without an advertisement for other tools
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet

install: $(STAMP)

$(PY):
	@for python in $(PYTHON); do \
	  if $$python -c $(USABLE) 2>/dev/null; then $$python -m venv $(VENV) && exit 0; rm -rf $(VENV); fi; \
	done; \
	echo "None of these is Python 3.11 or newer with venv: $(PYTHON)"; \
	echo "Name one: make PYTHON=/path/to/python3.12; on Debian and Ubuntu: apt install python3 python3-venv"; \
	exit 1

$(STAMP): pyproject.toml setup.py constraints.txt | $(PY)
	@echo "Installing lightning_pipes and what it needs into $(VENV), a few minutes the first time"
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-compile $(PINS) -e '.[dev]'
	@$(PY) -m compileall -q -j 0 -x '$(RARE)' $(VENV)/lib >/dev/null || true   # on all cores, where pip uses one; some files are templates
	@touch $@

clean:
	rm -rf .venv .venv-newest .venv-lightning-main build dist site *.egg-info outputs multirun lightning_logs .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
