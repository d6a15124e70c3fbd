# Everything runs in .venv, made on first use. Needs only make and Python 3.11 or later.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$p && break; done)
BIN := .venv/bin
CODE := src tests tools benchmarks experiments

# The matrices here are small: one thread is about as fast as two, and does not spin at barriers
# while another process holds the core, which costs a factor of ten (docs/lab/LOG.md).
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test slow crash fuzz gguf chains docs dist lint check format real clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "coec needs Python 3.11 or later: install it, or pass PYTHON=/path/to/python"; exit 1; }
	@echo "setting up .venv with $(PYTHON) (a few minutes, once)"
	@$(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: .venv/ready  ## prune a bundled model seven ways, and compare
	@$(BIN)/python -m coec.demo

# A process for every core up to four; more would wait for the longest test.
WORKERS ?= $(shell $(PYTHON) -c 'import os; n = min(os.cpu_count() or 1, 4); print(n if n > 1 else 0)')

test: .venv/ready  ## the test suite
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

slow: .venv/ready  ## what test leaves out: long runs, less usual models, many cases, a browser, a GPU
	@$(BIN)/python -m pytest -m "(many or browser or gpu or slow) and not (crash or fuzz or llama_cpp or chains)" -n $(WORKERS) --dist worksteal

crash: .venv/ready  ## runs that are killed and go on, which test leaves out too (COEC_CRASH_RUNS each)
	@$(BIN)/python -m pytest -m crash -n $(WORKERS) --dist worksteal

fuzz: .venv/ready  ## mutated inputs, which test leaves out too (COEC_FUZZ_CASES of them)
	@$(BIN)/python -m pytest -m fuzz -n $(WORKERS) --dist worksteal

# Compiles llama.cpp (many minutes on 2 cores, once), apart from .venv. It runs on the kind of
# machine that it was built on.
.venv-gguf/ready: .venv/ready
	@rm -rf .venv-gguf
	@echo "building llama.cpp in .venv-gguf (needs a C++ compiler; many minutes, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv-gguf \
		llama-cpp-python==0.3.36 diskcache==5.6.3
	@touch $@

gguf: .venv-gguf/ready  ## what llama.cpp computes from exported files, which test leaves out too
	@PYTHONPATH=.venv-gguf $(BIN)/python -m pytest -m llama_cpp

.venv-chains/ready: Makefile .venv/ready
	@rm -rf .venv-chains
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv-chains \
		torchao==0.18.0 bitsandbytes==0.50.0
	@touch $@

chains: .venv-chains/ready  ## what torchao and bitsandbytes make of pruned models, which test leaves out too
	@PYTHONPATH=.venv-chains $(BIN)/python -m pytest -m chains

.venv-docs/ready: Makefile constraints.txt
	@$(PYTHON) -m venv --clear .venv-docs
	@.venv-docs/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		mkdocs-material mkdocstrings-python ruff typer rich
	@touch $@

# With --quiet no warning is counted, and --strict fails at none. Ruff wraps the signatures.
docs: .venv-docs/ready  ## the documentation as a site, in site/; a link that leads nowhere fails
	@NO_MKDOCS_2_WARNING=1 PATH=$(CURDIR)/.venv-docs/bin:$$PATH PYTHONPATH=src .venv-docs/bin/mkdocs build --strict

.venv-dist/ready: Makefile constraints.txt
	@$(PYTHON) -m venv --clear .venv-dist
	@.venv-dist/bin/pip install --quiet --disable-pip-version-check -c constraints.txt build twine
	@touch $@

# The wheel alone, in an environment of its own, prunes the bundled model and measures it.
dist: .venv-dist/ready  ## wheel and sdist in dist/, checked; the wheel runs where nothing else is installed
	@rm -rf dist .venv-dist/empty
	@.venv-dist/bin/python -m build --outdir dist >.venv-dist/build.log || { cat .venv-dist/build.log; exit 1; }
	@.venv-dist/bin/twine check --strict dist/*
	@$(PYTHON) -m venv .venv-dist/empty
	@.venv-dist/empty/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	@cd .venv-dist/empty && model=$$(bin/python -c "import coec.demo; print(*coec.demo.__path__)")/model && \
		bin/coec prune $$model pruned --calibration ../../README.md --seq-len 64 --samples 8 --force && \
		bin/coec eval pruned --baseline $$model --text ../../CONTRIBUTING.md --seq-len 64

lint: .venv/ready  ## format, style, types, import contracts, words
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tools/words.py src/coec README.md ARCHITECTURE.md docs/*.md

check: lint test  ## lint, then test

format: .venv/ready  ## mend format and what lint can mend
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/ruff check --fix $(CODE)

real: .venv/ready  ## the presets and their peers on a real model, docs/lab/RESULTS.md (needs ../shared; fetches 93 MB; hours)
	@$(BIN)/python -m benchmarks.real

clean:  ## remove the environments, what the demo wrote, and what docs and dist made
	@rm -rf .venv .venv-gguf .venv-chains .venv-docs .venv-dist dist site demo-output
