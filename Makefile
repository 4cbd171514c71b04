# `make help` lists the targets; each does its own set-up in .venv and reuses it when current.
PY := .venv/bin/python
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup train test lint format bench clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make or refresh .venv (real vLLM for CPU included)
	@$${PYTHON:-python3} tools/setup_env.py

train: setup ## the main job: teach a tool-using agent on this machine's CPU (ARGS="--steps 20")
	@$(PY) -m areal_agent.cli train examples/agents/calculator.py $(ARGS)

test: setup lint ## lint and run every test, those on real engines last and one at a time (ARGS="tests/gateway")
	@$(PY) -m pytest -n 2 --dist loadfile -m "not slow and not engine" $(ARGS)
	@$(PY) -m pytest -m "engine and not slow" $(ARGS) || [ $$? -eq 5 ]

lint: setup ## ruff, pyright and the import contracts
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .
	@.venv/bin/pyright
	@.venv/bin/lint-imports

format: setup ## rewrite the code in the project's format
	@.venv/bin/ruff check --fix . && .venv/bin/ruff format .

bench: setup ## list the benchmarks
	@for f in benchmarks/[a-z]*.py; do printf '  python %-34s %s\n' $$f "$$($(PY) -c "import ast,sys;print(ast.get_docstring(ast.parse(open(sys.argv[1]).read())).splitlines()[0])" $$f)"; done

clean: ## remove .venv, caches and runs
	rm -rf .venv .cache runs .pytest_cache .ruff_cache .hypothesis .import_linter_cache
