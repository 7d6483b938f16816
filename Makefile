# `make mnist` runs the example, `make test` all tests; each sets up .venv by itself.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# the first Python at hand that TensorFlow 2.15 supports
PYTHON ?= $(firstword $(foreach p,python3 python3.11 python3.10 python3.9,$(shell \
	$(p) -c 'import sys; (3, 9) <= sys.version_info[:2] < (3, 12) and print("$(p)")' 2>/dev/null)))
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: mnist test check format clean

mnist: $(STAMP)
	$(BIN)/hostopt run -np 2 --evaluators 1 -- $(BIN)/python examples/mnist/main.py \
		--model-dir mnist_model/$$(date +%Y%m%d-%H%M%S) $(MNIST_ARGS)

test: check
	$(BIN)/python -m pytest -m tensorflow

# fast: style, types, and the tests that start no TensorFlow
check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not tensorflow"

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(STAMP): setup.cfg constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.9, 3.10 or 3.11 found: install one, or say \
	make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[examples,test]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache
