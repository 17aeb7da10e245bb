# make run      build, fetch SmolLM2-135M-Instruct and chat (with no terminal: answer one prompt)
# make test     install what the tests need, fetch their models and run them
# make bench    speed of steps, and of a server over HTTP, with answers checked
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(shell find src/pagoda/kernels -name '*.cpp' -o -name '*.h')

.PHONY: run test lint golden bench clean
.DEFAULT_GOAL := run

run: $(VENV)/.installed
	@if [ -t 0 ]; then $(BIN)/pagoda run smollm2-135m; else $(BIN)/pagoda run smollm2-135m --temperature 0 </dev/null; fi

test: $(VENV)/.installed-test lint
	@$(BIN)/python -m tests.fetch_models
	@$(BIN)/python -m pytest -m "not slow"

lint: $(VENV)/.installed-test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(VENV)/.installed-test
	@$(BIN)/python -m tests.fetch_models smollm2-135m-instruct-q4_1
	@$(BIN)/python -m benchmarks.step
	@$(BIN)/python -m benchmarks.serving

# Answers of Hugging Face transformers made again; fails where they differ from the files in tests/golden.
golden: $(VENV)-golden/.installed
	@$(VENV)-golden/bin/python tests/golden/make_model_golden.py --check
	@$(VENV)-golden/bin/python tests/golden/make_tokenizer_golden.py --check

clean:
	rm -rf build $(VENV) $(VENV)-golden

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Pagoda needs Python 3.10 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	@echo "Building and installing Pagoda into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

$(VENV)-golden/.installed: pyproject.toml
	@$(PYTHON) -m venv $(VENV)-golden
	@$(VENV)-golden/bin/python -m pip install --quiet --disable-pip-version-check -e '.[golden]'
	@touch $@
