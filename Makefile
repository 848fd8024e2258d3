# Everything a person types. `make quickstart` needs Python 3.11 or 3.12 and g++, nothing else.
.PHONY: quickstart setup test test-slow test-again soak mutants check proto fmt constraints clean
bin := .venv/bin

quickstart:  ## set up, then train the recipe of the README
	@scripts/setup quickstart
	@$(bin)/fourfold run recipes/quickstart.toml

setup:  ## the environment for development
	@scripts/setup dev

test: setup  ## everything that is not slow; under ten minutes on two cores
	$(bin)/python -m pytest -m "not slow" tests

test-slow: setup
	$(bin)/python -m pytest -m slow tests

test-again: setup  ## only what failed in the last run of either
	$(bin)/python -m pytest --last-failed --last-failed-no-failures none tests

soak: setup  ## an hour of faults, traffic and malformed calls; no part of CI. SOAK_MINUTES is for the rollout service
	FOURFOLD_FUZZ_CALLS=100000 $(bin)/python -m pytest -s tests/security/test_fuzz.py
	FOURFOLD_SOAK_MINUTES=$(or $(SOAK_MINUTES),30) $(bin)/python -m pytest -s -m slow tests/integration/test_rollout_soak.py
	$(bin)/python -m pytest -s -m slow tests/integration/test_weight_soak.py
	FOURFOLD_SOAK_MINUTES=1 $(bin)/python -m pytest -s -m slow tests/integration/test_hostile_reward_run.py

mutants:  ## small faults in the central modules: which do the tests miss? about half an hour
	@scripts/setup mutants
	nice -n 10 $(bin)/python -m tests.mutants

check: setup  ## format, lint, types, import rules, protos
	@scripts/check

proto: setup  ## lint the contract and regenerate the stubs
	$(bin)/buf lint proto
	scripts/proto

fmt: setup
	$(bin)/ruff format .
	$(bin)/ruff check --fix .
	$(bin)/buf format -w proto

constraints: setup  ## resolve the pinned versions anew
	scripts/constraints

clean:  ## everything that was made, but no run
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -rf *.egg-info services/*/build services/*/*.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
