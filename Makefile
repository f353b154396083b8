# Everything happens in a virtual environment of this repository; both commands set it up on a fresh machine.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
PYTEST_ARGS ?=

.PHONY: demo pictures test lint

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

# The README's pictures; needs Chromium and its driver.
pictures: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[pictures]'
	$(BIN)/python docs/pictures.py

# The simulated device is registered for a whole process, so its tests have one of their own.
test: lint
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/simdevice $(PYTEST_ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
