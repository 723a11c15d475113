# The commands of this repository; `make` alone lists them. CI runs the same ones.
#   make test ARGS="-k feed -x"           arguments for pytest
#   make test JOBS=0                      in one process, for a debugger (default: cores + 1 processes, at most 5)
#   make test INPUTS=1000000 SEED=1 ARGS="tests/fuzz --timeout 0"     number and seed of the random inputs
#   make test-deep CHANGED=main           only the folders that differ from this commit
#   make soak MINUTES=10 SEED=1           duration, and seed of the random schedule
#   make coverage ARGS=tests/feed         the coverage of one folder's tests
#   make bench NAME=feed ARGS=--help      one benchmark: feed, inference, job, launch, recovery, scale
#   make setup PYTHON=python3.12          instead of the first suitable one on the PATH
#   make setup TENSORFLOW=tensorflow      the GPU build instead of tensorflow-cpu
#   make setup TORCH_INDEX=               PyPI's build of PyTorch instead of the CPU build
#   make setup TORCH= JAX=                without PyTorch, without JAX

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-deep test-hosts test-connect test-matrix test-spark-3.5 coverage soak check docs bench clean

VENV := .venv
PEERS := .venv-peers
CLIENT := build/connect-client
SPARK_3_5 := build/spark-3.5
PYTHON ?=
TENSORFLOW ?= tensorflow-cpu
TORCH ?= torch
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
JAX ?= jax
ARGS ?=
CHANGED ?=
MINUTES ?= 1
INPUTS ?=
SEED ?=
# One more than the number of cores: few tests keep a core busy all the time.
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); [ $$n -lt 4 ] || n=4; echo $$((n + 1)))
TF_CPP_MIN_LOG_LEVEL ?= 2

bin = $(CURDIR)/$(VENV)/bin
comma := ,
pytest = $(bin)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder
with_java = JAVA_HOME="$$(sh scripts/java.sh)" || exit 1; export JAVA_HOME;

# Without Chromium, and if it cannot be installed, the tests of the dashboard's pages are skipped.
with_browser = $(bin)/python -m scripts.browser install >/dev/null;
find_python = python="$$(for each in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10); do \
  "$$each" -c 'import sys, venv, ensurepip; raise SystemExit(not (3, 10) <= sys.version_info < (3, 14))' >/dev/null 2>&1 && echo "$$each" && break; done)"; \
  [ -n "$$python" ] || { echo "No Python from 3.10 to 3.13 with venv was found on the PATH. Install one (on Debian and Ubuntu: sudo apt-get" \
  "install python3-venv), or name yours: make setup PYTHON=/path/to/python3.12" >&2; exit 1; };

export TF_CPP_MIN_LOG_LEVEL
export FUZZ_INPUTS = $(INPUTS)
export FUZZ_SEED = $(SEED)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYSPARK_PYTHON = $(bin)/python
export PYSPARK_DRIVER_PYTHON = $(bin)/python
# Use the Spark that pip installed, without a cluster's configuration.
unexport SPARK_HOME SPARK_CONF_DIR HADOOP_CONF_DIR YARN_CONF_DIR PYTHONPATH
# Otherwise each of the thousand processes that tests start compiles sparkdl again.
unexport PYTHONDONTWRITEBYTECODE

help:  ## list the commands
	@sed -n 's/^\([a-z0-9.-]*\):.*  ## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
	  || sed -n 's/^\([a-z0-9.-]*\):.*  ## \(.*\)/  make \1: \2/p' $(MAKEFILE_LIST)

setup: $(VENV)/.installed  ## find Python and Java, and build .venv, unless it is up to date
	@sh scripts/java.sh >/dev/null

$(VENV)/.installed: setup.py constraints.txt Makefile
	@$(find_python) \
	  $(VENV)/bin/python -m pip --version >/dev/null 2>&1 || "$$python" -m venv --clear $(VENV)
	@echo "Installing into $(VENV); the first time takes some minutes."
	@$(VENV)/bin/python -m pip install -q --upgrade pip -c constraints.txt
	@# PyPI's PyTorch for Linux comes with CUDA. It is installed below if this index cannot be reached.
	@[ -z "$(TORCH)" ] || [ -z "$(TORCH_INDEX)" ] || $(VENV)/bin/python -m pip install -q -c constraints.txt --no-deps \
	  --index-url $(TORCH_INDEX) --retries 0 --timeout 20 torch >/dev/null 2>&1 || true
	@# As a path, not as an import hook: mypy, pyright and editors read only paths.
	@PYTHONWARNINGS=ignore $(VENV)/bin/python -m pip install -q -c constraints.txt --config-settings editable_mode=compat \
	  -e '.[dev$(addprefix $(comma),$(TENSORFLOW) $(TORCH) $(JAX))]'
	@# Without dependencies: it requires the distribution tensorflow, which would overwrite tensorflow-cpu.
	@$(VENV)/bin/python -m pip install -q -c constraints.txt --no-deps tf_keras
	@# Not in an extra, which would install PyTorch even without TORCH.
	@[ -z "$(TORCH)" ] || $(VENV)/bin/python -m pip install -q -c constraints.txt accelerate datasets peft transformers trl
	@touch $@

demo_conf = $(addprefix --conf ,spark.ui.enabled=false spark.ui.showConsoleProgress=false \
  spark.python.unix.domain.socket.enabled=true)
demo: TF_CPP_MIN_LOG_LEVEL = 3  # during shutdown, TensorFlow logs that nodes are unreachable
demo: setup  ## train a small model on a local Spark cluster
	@mkdir -p out; $(with_java) PYSPARK_PYTHON=$(bin)/python $(bin)/spark-submit --master 'local-cluster[2,2,1024]' $(demo_conf) \
	  examples/digits/train.py $(ARGS) 2>out/spark.log || { cat out/spark.log >&2; exit 1; }

test test-deep test-hosts test-connect test-matrix coverage: build/spark.jsa
build/spark.jsa: $(VENV)/.installed tests/doubles/classes.py tests/doubles/sessions.py
	@$(with_java) $(bin)/python -m tests.doubles.classes $@ >/dev/null 2>&1 || true  # tests also run without it

test: setup  ## run the tests that this machine can run, except for those of check and the deep ones
	@$(with_java) $(with_browser) $(pytest) $(patsubst %,--ignore=%,$(in_check)) $(ARGS)

# pytest exits with 5 if a folder has no deep tests.
changed = $(wildcard $(shell git diff --name-only $(CHANGED) | sed -nE \
  's!^(sparkdl|tests)/([a-z_]+)/.*!tests/\2!p; s!^(docs/.*|README)\.md$$!tests/pages!p; s!^(examples|notebooks)/.*!tests/\1!p' | sort -u))
test-deep: setup  ## run the deep tests: long ones, further frameworks, Hypothesis with 1,000 examples
	@$(with_java) $(with_browser) $(if $(CHANGED),[ -z "$(changed)" ] ||) $(pytest) --deep $(ARGS) $(if $(CHANGED),$(changed) || [ $$? = 5 ])

test-matrix: setup  ## run tests with other versions of Spark, Python and frameworks (ARGS=3.5-3.10: one row)
	@$(with_java) $(bin)/python -m scripts.matrix $(ARGS)

test-spark-3.5: setup $(SPARK_3_5)/.installed  ## run a few tests with the oldest Spark, in the same environment
	@$(with_java) PYTHONPATH="$(CURDIR)/$(SPARK_3_5)" $(pytest) -W default $(ARGS) \
	  -k "versions or detached_nodes or inference_answers or scans_that_nodes_read" \
	  tests/test_spark_versions.py tests/driver/executors

# Only pyspark and py4j, which take precedence over those of the environment.
$(SPARK_3_5)/.installed: Makefile
	@$(bin)/python -m pip install -q --upgrade --target $(SPARK_3_5) 'pyspark==3.5.*'
	@touch $@

test-hosts: setup  ## run all tests on several hosts, simulated by Linux namespaces (as root)
	@$(with_java) $(pytest) --deep $(ARGS) tests/hosts

test-connect: setup $(CLIENT)/.installed  ## run the tests of Spark Connect with a client that has only pyspark-client
	@$(with_java) $(pytest) --deep $(ARGS) tests/connect tests/hosts/test_connect_client.py

# Without the pinned pyspark: a client may be older or newer than its server.
$(CLIENT)/.installed: setup.py constraints.txt
	@$(bin)/python -m venv --clear $(CLIENT)
	@sed '/^pyspark/d' constraints.txt > $(CLIENT)/constraints.txt
	@$(CLIENT)/bin/python -m pip install -q -c $(CLIENT)/constraints.txt '.[client,tuning]'
	@touch $@

coverage: setup  ## run the tests, and print the coverage of each package, including agents and children
	@$(bin)/coverage erase
	@$(with_java) $(with_browser) $(pytest) --cov --cov-report=html:build/coverage $(ARGS); status=$$?; \
	  for each in sparkdl/[a-z]*/; do echo "$$each $$($(bin)/coverage report --format=total --include="$$each*") %"; done; exit $$status

soak: setup  ## inject random faults into trainings for MINUTES (1), by SEED; no row may be lost
	@PYTHONPATH="$(CURDIR)" MINUTES="$(MINUTES)" SEED="$(SEED)" $(bin)/python tests/faults/soak.py

docs: setup  ## build the documentation site in build/site
	@$(bin)/python -m scripts.site

in_check := tests/test_architecture.py tests/test_docs.py
check: $(VENV)/.installed  ## lint, format, types, architecture, spelling
	@$(bin)/ruff check .
	@$(bin)/ruff format --check .
	@$(bin)/mypy
	@$(bin)/codespell
	@$(bin)/python -m pytest -q $(in_check)

$(PEERS)/.installed: benchmarks/requirements-peers.txt
	@$(find_python) \
	  $(PEERS)/bin/python -m pip --version >/dev/null 2>&1 || "$$python" -m venv --clear $(PEERS)
	@$(PEERS)/bin/python -m pip install -q -r $<
	@touch $@

bench: export CUDA_VISIBLE_DEVICES =  # benchmarks measure CPUs; two nodes would need two GPUs
bench: setup $(if $(filter-out scale,$(NAME)),$(PEERS)/.installed)  ## compare sparkdl with its peers: NAME=feed and others, see benchmarks/README.md
	@$(with_java) PYTHONPATH="$(CURDIR)" $(bin)/python benchmarks/$(or $(NAME),$(error NAME is missing. Example: make bench NAME=feed)).py $(ARGS)

clean:  ## remove generated files, except for the environments
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage* spark-warehouse
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
