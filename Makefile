# stabbook: two commands, `make book` and `make test`; `make help` lists the rest.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.PHONY: help book test serve reproduce verify export readme clean lock

PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/.installed
# Small matrices: one thread a process, several processes side by side.
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
SCALE ?= smoke
JOBS ?= 2
N ?= 5
PORT ?= 8000

help: ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  make reproduce SCALE=cpu EXPERIMENT=learning_rate [WORKERS=2]"
	@echo "  make verify N=5 [EXPERIMENT=learning_rate] [SCALE=cpu] [SEED=1]"
	@echo "  make book PYTHON=python3.12      another Python (3.11, 3.12 or 3.13)"

$(READY): requirements.lock settings.ini setup.py pyproject.toml
	@$(PYTHON) book/install.py

book: $(READY) ## install, run every page, build the site, print where it is
	@$(PY) book/build.py book --jobs $(JOBS)

test: $(READY) ## clean and export leave no diff, nbdev_test, pytest
	@$(PY) tests/gates.py

serve: $(READY) ## show the site on localhost
	@$(PY) book/build.py serve --port $(PORT)

reproduce: $(READY) ## train what the store lacks: SCALE=cpu EXPERIMENT=learning_rate
	@$(PY) book/build.py run "$(EXPERIMENT)" --scale "$(SCALE)" $(if $(WORKERS),--workers $(WORKERS))

verify: SCALE = cpu
verify: $(READY) ## train N stored runs again: bit-equal, consistent or different
	@.venv/bin/stabbook verify $(EXPERIMENT) -n "$(N)" --scale "$(SCALE)" $(if $(SEED),--seed "$(SEED)")

export: $(READY) ## write stabbook/ anew from the notebooks
	@find stabbook -name '*.py' -delete 2>/dev/null || true
	@.venv/bin/nbdev_export

clean: ## delete what the build made (not .venv, not the results)
	rm -rf book/_stage book/_build book/_cache build dist *.egg-info

readme: $(READY) ## write the README's result table and picture from the store
	@$(PY) book/readme.py

lock: ## resolve settings.ini again and write requirements.lock
	@$(PYTHON) book/install.py lock
