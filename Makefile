# Everything runs from `.venv` in this folder, made on first use; nothing needs to be activated.
#
#   make demo       the main job, on real data          make lint       ruff, mypy, import layers
#   make check      for every save: 90 seconds          make bench      speed and memory, as ratios
#   make test       every suite: 10 minutes             make gallery    draw the pictures of docs/ again
#   make test-full  all cases, and the wide sweeps      make pages      reference and outputs in docs/, from the code
#   make docs       the site, in site/

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# pip compiles no modules: the demo imports a part of what is installed, and `make test` compiles all on every core.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --editable

.PHONY: demo check test test-changed test-full lint bench gallery pages docs browser clean
.DEFAULT_GOAL := test

demo: .venv/.demo
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/rnnlens demo

check: .venv/.dev
	@$(BIN)/python tests/suites.py --check

test: .venv/.dev browser
	@$(BIN)/python tests/suites.py

test-changed: .venv/.dev browser
	@$(BIN)/python tests/suites.py --changed

test-full: .venv/.dev browser
	@$(BIN)/python tests/suites.py --full

lint: .venv/.dev
	@$(BIN)/python tests/suites.py lint

bench: .venv/.dev
	@$(BIN)/python benchmarks/run_all.py

gallery: .venv/.dev
	@$(BIN)/python docs/gallery/make.py

# What a page takes from the code: the reference, and scripts with what they print.
pages: .venv/.dev
	@$(BIN)/python docs/site/pages.py --outputs

docs: pages
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo "site/index.html"

# What the report is tested in. Installed where that may be done; otherwise `make test` says what was not tested.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { echo "Installing Debian's Chromium"; apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; }; } || true

clean:
	rm -rf .venv demo-output site

.venv/bin/python:
	@echo "Making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "Python >= 3.11 with venv is needed (on Debian: python3-venv)" >&2; exit 1; }

# A stamp per set of packages: installed again only when pyproject.toml changes.
.venv/.demo: pyproject.toml | .venv/bin/python
	@echo "Installing rnnlens with Keras, JAX and scikit-learn into .venv"
	@$(PIP) '.[demo]'
	@touch $@

.venv/.dev: pyproject.toml | .venv/bin/python
	@echo "Installing rnnlens with every framework and the development tools into .venv"
	@$(PIP) '.[dev]'
	@# tf_keras asks for the full TensorFlow, on top of the tensorflow-cpu that is there: it needs the one only.
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --no-deps 'tf_keras==2.21.0'
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true  # some packages hold files for other versions of Python
	@touch $@ .venv/.demo
