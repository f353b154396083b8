# Everything happens in a virtual environment of this repository; both commands set it up on a fresh machine.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
APART = $(VENV)/apart
PYTEST_ARGS ?=

.PHONY: demo pictures test test-oldest lint

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

# The README's pictures; needs Chromium and its driver.
pictures: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[pictures]'
	$(BIN)/python docs/pictures.py

# The simulated device is registered for a whole process, so its tests have one of their own. So have those with
# DeepSpeed and torchao, since Lightning and others act differently where these are: they lie in a folder that only the
# last process knows.
test: lint $(APART)/.installed
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/simdevice --numprocesses auto --dist worksteal $(PYTEST_ARGS)
	DS_ACCELERATOR=cpu PYTHONPATH=$(abspath $(APART)) $(BIN)/python -m pytest tests/deepspeed tests/test_torchao.py \
		$(PYTEST_ARGS)

$(APART)/.installed: $(VENV)/.installed constraints.txt
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip install --quiet --upgrade --target $(APART) --no-deps \
		--constraint constraints.txt deepspeed einops hjson msgpack py-cpuinfo torchao
	touch $@

# The oldest versions that are supported.
test-oldest: .venv-oldest/.installed
	.venv-oldest/bin/python -m pytest --numprocesses auto --dist worksteal -m 'not slow' $(PYTEST_ARGS)
	.venv-oldest/bin/python -m pytest tests/simdevice --numprocesses auto --dist worksteal -m 'not slow' $(PYTEST_ARGS)

.venv-oldest/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[dev]'
	touch $@

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
