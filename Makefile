# make demo   sets up and runs the main job: train, measure and report a small recurrent-depth model
# make test   sets up and runs the tests
# make check  lint, types, import contracts, tests
# make clean  removes what these made (not runs/)
PYTHON ?= python3
PIP_ARGS ?=
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)

.PHONY: demo test slow long check lint clean

demo: .venv/demo
	.venv/bin/alcoda quickstart

# Two workers of one thread each: most tests are of small models, whose sums are to be taken in one order.
test: .venv/dev
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2

# Threads that spin while they wait would slow each other down (docs/LOG.md).
slow: .venv/dev
	OMP_WAIT_POLICY=PASSIVE .venv/bin/python -m pytest -m slow

# Trains every mini recipe for 200 steps and prints a table.
long: .venv/dev
	OMP_WAIT_POLICY=PASSIVE .venv/bin/python -m pytest -m long

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyrefly check
	.venv/bin/lint-imports

check: lint test

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("alcoda needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": set PYTHON=") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv .venv

# pip, and the tested versions. PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" takes the CPU build of torch.
.venv/demo: .venv/bin/python pyproject.toml constraints.txt
	@echo 'installing alcoda with torch into .venv ...'
	$(PIP) -e '.[report]'
	touch $@

.venv/dev: .venv/bin/python pyproject.toml constraints.txt
	@echo 'installing alcoda with torch and the development tools into .venv ...'
	$(PIP) -e '.[dev]'
	touch $@ .venv/demo

clean:
	rm -rf .venv .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
