# Everything runs from `.venv` in this folder, made on first use; nothing needs to be activated.
#
#   make demo       the main job, on real data          make lint       ruff, mypy, import layers
#   make check      for every save: 90 seconds          make bench      speed and memory, as ratios
#   make test       every suite: 10 minutes             make gallery    draw the pictures of docs/ again
#   make test-full  all cases, and the wide sweeps      make pages      reference and outputs in docs/, from the code
#   make docs       the site, in site/                  make lock       renew the versions of constraints.txt
#   make test-world  models of public packages, in an environment of their own
#   make release    wheel and sdist, in dist/, checked in a fresh environment

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
# pip compiles no modules: the demo imports a part of what is installed, and `make test` compiles all on every core.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile

.PHONY: demo check test test-changed test-full test-world core newest lint bench gallery pages docs lock release browser clean
.DEFAULT_GOAL := test

demo: .venv/.demo
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/rnnlens demo

check: .venv/.dev
	@$(BIN)/python tests/suites.py --check

test: .venv/.dev browser
	@$(BIN)/python tests/suites.py

test-changed: .venv/.dev browser
	@$(BIN)/python tests/suites.py --changed

# Models of public packages, in an environment of their own; not a part of the other tests.
test-world: .venv/.dev
	@$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python .venv-world
	@export UV=$(BIN)/uv UV_FIND_LINKS="$${UV_FIND_LINKS:-$$PIP_FIND_LINKS}"; \
	  $$UV pip install --quiet --python .venv-world 'torch==2.13.0' --editable . && \
	  .venv-world/bin/python tests/world/run.py --install $(WORLD)

test-full: .venv/.dev browser
	@$(BIN)/python tests/suites.py --full

core: .venv/.dev
	@$(BIN)/python tests/suites.py core unit

lowest-%: .venv/.dev
	@$(BIN)/python tests/suites.py $@

# The newest frameworks that exist, against pyproject.toml; the next command of the others installs what that says again.
newest: .venv/.dev
	@$(PIP) --upgrade keras jax torch tensorflow-cpu; rm .venv/.dev
	@$(BIN)/python tests/suites.py core unit torch keras-torch keras-jax keras-tensorflow

lint: .venv/.dev
	@$(BIN)/python tests/suites.py lint

bench: .venv/.dev
	@$(BIN)/python benchmarks/run_all.py

gallery: .venv/.dev
	@$(BIN)/python docs/gallery/make.py
	@$(BIN)/python docs/gallery/live.py

# What a page takes from the code: the reference, and scripts with what they print.
pages: .venv/.dev
	@$(BIN)/python docs/site/pages.py --outputs

docs: pages
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo "site/index.html"

# The newest versions that pyproject.toml allows, for every Python and system.
lock: .venv/.dev
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --upgrade --no-header --no-annotate \
	  --all-extras --group dev pyproject.toml --output-file constraints.txt

release: .venv/.dev
	@rm -rf dist && $(BIN)/uv build --quiet --all-packages --out-dir dist && $(BIN)/twine check --strict dist/*
	@RNNLENS_DIST=dist $(BIN)/python -m pytest -q -p no:cacheprovider tests/wheel
	@$(BIN)/towncrier build --draft --version "$$($(BIN)/rnnlens --version | cut -d' ' -f2)"

# What the report is tested in. Installed where that may be done; otherwise `make test` says what was not tested.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { echo "Installing Debian's Chromium"; apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; }; } || true

clean:
	rm -rf .venv demo-output site

$(BIN)/python:
	@echo "Making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "Python >= 3.11 with venv is needed (on Debian: python3-venv)" >&2; exit 1; }

# A stamp per set of packages: installed again only when these two files change.
.venv/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing rnnlens with Keras, JAX and scikit-learn into .venv"
	@$(PIP) --constraint constraints.txt --editable '.[demo]'
	@touch $@

.venv/.dev: pyproject.toml packages/rnnlens-tf1/pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing rnnlens with every framework and the development tools into .venv"
	@$(PIP) 'pip>=25.1'  # earlier ones know no dependency groups
	@$(PIP) --constraint constraints.txt --editable '.[demo,dask]' --editable packages/rnnlens-tf1 --group dev
	@# tf_keras asks for the full TensorFlow, on top of the tensorflow-cpu that is there: it needs the one only.
	@$(PIP) --no-deps 'tf_keras==2.21.0'
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true  # some packages hold files for other versions of Python
	@touch $@ .venv/.demo
