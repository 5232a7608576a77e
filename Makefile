# make demo: see it work.  make test: every check and test.  Both set everything up, in .venv, the first time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo test check browser docs bench results format clean

help:
	@echo "make demo    set up, adapt an embedded model to mixed corruptions, print a table, draw a figure"
	@echo "make test    set up, run all checks and tests"
	@echo "make setup   only set up the environment, in .venv"
	@echo "make check   ruff, mypy, import-linter only"
	@echo "make docs    build the docs as a site, in site/"
	@echo "make bench   what everything costs, as ratios to the least it could cost: ten minutes on a quiet machine"
	@echo "make results OUTPUT=DIR  run the commands behind docs/results again, in another folder, and compare (NAMES=, LIMIT=, STAND_IN=1)"
	@echo "make format  format the code"
	@echo "make clean   remove the environment and what was made"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "cafe-tta needs Python 3.11 or later: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(READY)
	$(BIN)/cafe-tta demo --output demo

test: check browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# The dashboard is tested in a real browser. Where it cannot be had, those tests are skipped, and say so.
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		export DEBIAN_FRONTEND=noninteractive; install="apt-get install -y -qq --no-install-recommends chromium chromium-driver"; \
		$$install >/dev/null 2>&1 || { apt-get update -qq >/dev/null 2>&1 && $$install >/dev/null 2>&1; } \
		|| echo "note: chromium and chromium-driver could not be installed; the tests of the dashboard are skipped"; \
	else echo "note: without chromium and chromium-driver the tests of the dashboard are skipped; on Debian: apt-get install chromium chromium-driver"; fi

bench: $(READY)
	$(BIN)/python benchmarks/steps.py --repeats 5
	$(BIN)/python benchmarks/steps.py --model torchvision:resnet50 --size 224 --batch 8 --repeats 3 --cuts layer3 layer4
	$(BIN)/python benchmarks/step_memory.py
	$(BIN)/python benchmarks/torch_options.py --repeats 2
	$(BIN)/python benchmarks/alignment_loss.py
	$(BIN)/python benchmarks/source_side.py
	$(BIN)/python benchmarks/statistics_memory.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/corruptions.py --rounds 5
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py --repeats 3
	$(BIN)/python benchmarks/serve.py

# NAMES are patterns of folders in docs/results; python docs/reproduce.py --help says which data must be where.
results: $(READY)
	$(BIN)/python docs/reproduce.py $(if $(OUTPUT),--output $(OUTPUT)) $(if $(LIMIT),--limit $(LIMIT)) $(if $(STAND_IN),--stand-in) $(NAMES)

# The tests build it too, in a folder of their own, and check every link.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site
	@echo "written: site/index.html; with search: $(BIN)/python -m http.server --directory site"

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) demo site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
