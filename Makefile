# A newcomer needs two commands, each from a bare clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN_DIR ?= runs/demo

.PHONY: setup demo test check fix clean help

help:
	@echo "make demo    train a small GPT on this machine's Python sources, on 4 workers (2 minutes after set-up)"
	@echo "make test    run the tests"
	@echo "make check   lint, types, architecture"
	@echo "make fix     format, and mend what the linter can mend"
	@echo "make setup   only make $(VENV)/ with ringweave, PyTorch and the tools"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	@touch $@

demo: setup
	$(BIN)/ringweave run --workers 4 --run-dir $(RUN_DIR) examples/01_train_text.py --out $(RUN_DIR)

test: setup
	$(BIN)/pytest -n 2

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs
