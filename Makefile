# make demo   creates .venv, then runs the main experiment on a small corpus (no download); output in runs/demo/
# make test   creates .venv, then runs all tests that are not marked as slow
# make docs   creates .venv, then builds the pages of docs/ into site/, strictly
# All use the same .venv, so the second call starts immediately. PYTHON=... selects the Python interpreter.

.PHONY: demo test test-slow test-gpu docs lint results setup clean
.DEFAULT_GOAL := test

# One process more than cores, because some tests wait for other programs, such as Slurm.
PYTEST_ARGS ?= -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) --dist loadfile --no-loadscope-reorder

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt launch/setup.sh
	@sh launch/setup.sh

demo: .venv/installed
	@.venv/bin/python -m fairseq_alma.demo

test: .venv/installed
	@.venv/bin/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-slow: .venv/installed
	@.venv/bin/python -m pytest -m slow $(PYTEST_ARGS)

# The tests that need a CUDA device. Without one, they are skipped.
test-gpu: .venv/installed
	@.venv/bin/python -m pytest -m gpu

# Make all figures and tables of README.md and results/ again, from the committed ledgers.
results: .venv/installed
	@.venv/bin/python results/rebuild.py

# Dead links, missing pages and damaged docstrings are errors.
docs: .venv/installed
	@NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict --quiet && echo "open site/index.html"

# Several studies have the same file name, so mypy checks each of their folders alone.
STUDIES = books cifar10 frontier mnist policies

lint: .venv/installed
	@.venv/bin/ruff format --check . && .venv/bin/ruff check . && .venv/bin/mypy
	@MYPYPATH=results .venv/bin/mypy results/*.py && .venv/bin/mypy --explicit-package-bases results/rivals
	@for study in $(STUDIES); do MYPYPATH=results:results/$$study .venv/bin/mypy results/$$study/*.py || exit 1; done

clean:
	rm -rf .venv build *.egg-info
