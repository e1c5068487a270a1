# `make run` sets up, runs the main job on what this machine has, and serves the results; `make test` sets up and tests.
# Needs make and Python 3.10 to 3.13 only: no root, no GPU, no docker, no network but the package index.

HOST ?= 127.0.0.1
PORT ?= 8000
MAX_HEAD_DIM ?= 128
KERNEL_DEBUG ?= 0
WORKERS ?= 64
KILLS ?= 64
TESTS ?= tests
VENV ?= .venv

# The first interpreter that runs and is in range. `make PYTHON=/path/to/python3.12 test` says which.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13 python3.10 python; do \
	"$$p" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && \
	command -v "$$p" && break; done)

# Triton 3.9 needs Python 3.11; 3.8.0 is the newest for 3.10.
TRITON_OLDEST := 3.6.0
TRITON_NEWEST := $(shell "$(PYTHON)" -c 'import sys; print("3.9.0" if sys.version_info >= (3, 11) else "3.8.0")' 2>/dev/null)
TRITON_VENVS := .venv-triton-$(TRITON_OLDEST) .venv-triton-$(TRITON_NEWEST)

PY := $(VENV)/bin/python
PIP_INSTALL := -m pip --disable-pip-version-check install --quiet --quiet --no-compile

.PHONY: help run serve test lint format dash_kernel load soak fuzz audit sanitize simulate-cluster python-check port-check clean

help:
	@echo "make run           set up, tune (GPU) or compile and model (no GPU), serve on http://$(HOST):$(PORT)"
	@echo "make serve         set up and serve what is stored; no tuning"
	@echo "make test          set up and run the whole test suite (TESTS=tests/test_x.py for a part)"
	@echo "make lint          ruff and mypy"
	@echo "make dash_kernel   compile every shipped winner ahead of time (MAX_HEAD_DIM=128 KERNEL_DEBUG=0)"
	@echo "make load | soak   measure the service with 1,000,000 rows | watch its memory for 10 minutes (LOAD_DB=postgresql://...)"
	@echo "make fuzz          call the API with generated input for long (FUZZ_EXAMPLES=300)"
	@echo "make simulate-cluster   64 commands on one sweep, killed at random, with fake measurement (WORKERS=64 KILLS=64)"
	@echo "make audit         bandit over the code, pip-audit over what is installed"
	@echo "make sanitize      compute-sanitizer over small backwards (needs a GPU)"
	@echo "make clean         remove the environments and caches that make created"
	@echo "Settings: PORT, HOST, PYTHON, DASH_DB"

run: port-check $(VENV)/.installed
	@if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then \
		echo "A GPU is here: a short sweep of it, 2 minutes."; \
		set -- --gpu auto --budget 2m; \
	else \
		echo "No GPU here: 2 minutes of compiling for H800 (registers, spills and shared memory are real) and predicting with the model."; \
		set -- --gpu h800 --compile-only --simulate --budget 2m; \
	fi; \
	$(VENV)/bin/dash-tune "$$@"; code=$$?; \
	case $$code in \
		0|3) ;; \
		130) exit 130 ;; \
		*) echo "The main job failed (exit $$code, reason above). 'make serve' shows the shipped results without it." >&2; exit $$code ;; \
	esac
	@exec $(VENV)/bin/dash-serve --host "$(HOST)" --port "$(PORT)"

serve: port-check $(VENV)/.installed
	@exec $(VENV)/bin/dash-serve --host "$(HOST)" --port "$(PORT)"

test: $(VENV)/.installed-test $(TRITON_VENVS:=/.installed)
	DASH_TRITON_ENVS="$(CURDIR)/.venv-triton-$(TRITON_OLDEST)/bin/python:$(CURDIR)/.venv-triton-$(TRITON_NEWEST)/bin/python" \
		$(PY) -m pytest $(TESTS)

lint: $(VENV)/.installed-test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.installed-test
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Fake measurement, a real PostgreSQL: WORKERS commands share one sweep while KILLS of them are killed or put to sleep.
simulate-cluster: $(VENV)/.installed-test
	$(PY) tests/cluster_simulation.py --workers "$(WORKERS)" --kills "$(KILLS)"

# KERNEL_DEBUG=1 compiles anew and keeps each stage (TTGIR, LLVM IR, PTX, SASS, cubin) in build/kernels.
dash_kernel: $(VENV)/.installed
	@case "$(MAX_HEAD_DIM)" in ''|*[!0-9]*) echo "MAX_HEAD_DIM is '$(MAX_HEAD_DIM)'; it must be a number such as 128" >&2; exit 2 ;; esac; \
	case "$(KERNEL_DEBUG)" in \
		0) ;; \
		1) export TRITON_ALWAYS_COMPILE=1 TRITON_KERNEL_DUMP=1 TRITON_DUMP_DIR="$(CURDIR)/build/kernels" ;; \
		*) echo "KERNEL_DEBUG is '$(KERNEL_DEBUG)'; choose 0 or 1" >&2; exit 2 ;; \
	esac; \
	$(PY) -m dash_kernels.kernels.compile --shipped --max-head-dim "$(MAX_HEAD_DIM)"

sanitize: $(VENV)/.installed
	@for tool in memcheck racecheck synccheck; do \
		echo "$$tool"; compute-sanitizer --tool $$tool --error-exitcode 1 $(PY) benchmarks/sanitize.py || exit 1; \
	done

# Outside the gate: they take minutes, and their figures are of the machine that runs them.
LOAD_DB ?= build/load.db
LOAD_ROWS ?= 1000000
SOAK_MINUTES ?= 10
FUZZ_EXAMPLES ?= 300

soak load: $(VENV)/.installed-test
	@mkdir -p build
	$(PY) benchmarks/million.py "$(LOAD_DB)" $(LOAD_ROWS)
	$(PY) benchmarks/load.py --db "$(LOAD_DB)" --output build/$@.json $(if $(filter soak,$@),--soak $(SOAK_MINUTES))

fuzz: $(VENV)/.installed-test
	$(PY) benchmarks/fuzz.py --examples $(FUZZ_EXAMPLES)

audit: $(VENV)/.installed-test
	@$(PY) $(PIP_INSTALL) --constraint constraints.txt --editable ".[audit]"
	$(PY) -m bandit --quiet --recursive --configfile pyproject.toml dash_kernels tuner server dashboard
	$(PY) -m pip_audit --skip-editable

python-check:
	@test -n "$(PYTHON)" || { echo "No Python 3.10 to 3.13 found (python3 is $$(python3 --version 2>&1 || echo absent)): install one, or say make PYTHON=/path/to/python3.12" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { v=$$("$(PYTHON)" --version 2>&1) || v="not a program that runs"; echo "$(PYTHON) is $$v; Python 3.10 to 3.13 is needed: say make PYTHON=/path/to/python3.12" >&2; exit 2; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) has no venv module: install it (Debian and Ubuntu: the package python3-venv), or say make PYTHON=/path/to/another" >&2; exit 2; }

port-check: python-check
	@"$(PYTHON)" -c 'import socket, sys; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind((sys.argv[1], int(sys.argv[2])))' \
		"$(HOST)" "$(PORT)" 2>/dev/null || { echo "Port $(PORT) on $(HOST) is taken or not allowed: say make $(firstword $(MAKECMDGOALS)) PORT=8001" >&2; exit 2; }

# A stamp, written last, makes a second call quick and an interrupted set-up start over.
$(VENV)/.installed: pyproject.toml constraints.txt | python-check
	@echo "Setting up $(VENV) with $$("$(PYTHON)" --version) (PyTorch and Triton are large: this takes minutes, once) ..."
	@test -x $(PY) || "$(PYTHON)" -m venv $(VENV)
	@$(PY) $(PIP_INSTALL) --constraint constraints.txt --editable ".[postgres]"
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "Adding the test tools to $(VENV) ..."
	@$(PY) $(PIP_INSTALL) --constraint constraints.txt --editable ".[dev]"
	@touch $@

# Environments without torch: what compiles for a GPU must do so with the oldest and the newest Triton allowed.
.venv-triton-%/.installed: | python-check
	@echo "Setting up .venv-triton-$* (no torch) ..."
	@test -x .venv-triton-$*/bin/python || "$(PYTHON)" -m venv .venv-triton-$*
	@.venv-triton-$*/bin/python $(PIP_INSTALL) "triton==$*"
	@touch $@

clean:
	rm -rf $(VENV) .venv-triton-* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
