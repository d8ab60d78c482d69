# Every target builds the CPU environment first if it is not there yet (see tests/env/build.py); a second call takes a second.
SYSTEM_PYTHON := $(or $(shell command -v python3.11),python3)
# Only expanded inside recipes, so that `make clean` and the like never start a build.
PYTHON = $(shell $(SYSTEM_PYTHON) tests/env/build.py)

.PHONY: setup python demo test test-long lint bench soak

setup:
	@$(SYSTEM_PYTHON) tests/env/build.py >/dev/null

python:
	@$(SYSTEM_PYTHON) tests/env/build.py

demo: setup
	@$(PYTHON) -m mooncake_kv.common.cli demo $(ARGS)

lint: setup
	@$(PYTHON) tests/env/lint.py

test: lint
	@$(PYTHON) -m pytest $(ARGS)

# What would make `make test` longer than an hour.
test-long: lint
	@$(PYTHON) -m pytest -m long $(ARGS)

bench: setup
	@$(PYTHON) benchmarks/core.py
	@$(PYTHON) benchmarks/tiers.py
	@$(PYTHON) benchmarks/vllm_ttft.py

# Faults at random under load, for MINUTES minutes.
MINUTES := 10
soak: setup
	@$(PYTHON) tests/soak.py --minutes $(MINUTES) $(ARGS)
