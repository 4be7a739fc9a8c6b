# make demo   sets up, then the main job on the embedded corpus, in runs/demo/
# make test   sets up, then the whole test suite
# Both use the same .venv; a second call starts at once. PYTHON=... chooses the interpreter.

.PHONY: demo test test-slow lint results setup clean
.DEFAULT_GOAL := test

PYTEST_ARGS ?= -n auto --dist loadfile

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt launch/setup.sh
	@sh launch/setup.sh

demo: .venv/installed
	@.venv/bin/python -m fairseq_alma.demo

test: .venv/installed
	@.venv/bin/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-slow: .venv/installed
	@.venv/bin/python -m pytest -m slow $(PYTEST_ARGS)

# Every figure and table of README.md and results/, from the committed ledgers.
results: .venv/installed
	@.venv/bin/python results/rebuild.py

lint: .venv/installed
	@.venv/bin/ruff format --check . && .venv/bin/ruff check . && .venv/bin/mypy

clean:
	rm -rf .venv build *.egg-info
