# Commands for users and developers. `make install` needs only Python 3.11 or 3.12 and g++.
.PHONY: install quickstart ladder setup test test-slow lock lock-record soak mutants check docs reference proto fmt help constraints clean
bin := .venv/bin
# Many containers set it. Every process would then compile our modules again, which takes 0.7 s.
unexport PYTHONDONTWRITEBYTECODE

install:  ## set up the environment for runs on a CPU
	@scripts/setup quickstart
	@echo "install: next: source .venv/bin/activate && fourfold doctor"

quickstart:  ## set up the environment, then train the recipe of the README
	@scripts/setup quickstart
	@$(bin)/fourfold run recipes/quickstart.toml

ladder:  ## set up the environment, then train recipes/ladder: fine-tuning, reward model, PPO; continue what was stopped
	@scripts/setup quickstart
	@$(bin)/fourfold run recipes/ladder/sft.toml recipes/ladder/rm.toml recipes/ladder/ppo.toml --resume

setup:  ## set up the environment for development
	@scripts/setup dev

pytest := $(bin)/python -m pytest --dist loadfile -p tests.support.durations

test: setup  ## run all tests that are not slow; under seven minutes on two cores
	@# Many of them wait, for processes that start and for limits that pass: three processes keep two cores busy.
	$(pytest) -n 3 -m "not slow" tests

test-slow: setup  ## run the slow tests, with real engines and trainers
	@# In the order of the folders, the short files of tests/unit come last, and all processes end at the same time.
	$(pytest) -n 2 -m "slow and not soak and not lock" --no-loadscope-reorder $$(grep -rl --include="test_*.py" "mark\.slow" tests | sort)

lock: setup  ## compare behaviour with the committed records: values, contracts, files, faults and speeds; at most 12 minutes
	@# In reverse order the long files, those of tests/lock, come first.
	$(pytest) -n 2 -m lock --no-loadscope-reorder $$(grep -rl --include="test_*.py" "mark\.lock" tests | sort -r)

lock-record: setup  ## write the record of values again, after a change on purpose or with new libraries
	$(bin)/python -m tests.lock.seeded_run

soak: setup  ## run the tests that repeat for an hour or two, not in CI; SOAK_MINUTES: of the rollout service
	FOURFOLD_FUZZ_CALLS=100000 $(bin)/python -m pytest -s tests/security/test_fuzz.py
	FOURFOLD_SOAK_MINUTES=$(or $(SOAK_MINUTES),30) $(bin)/python -m pytest -s tests/integration/test_rollout_soak.py
	$(bin)/python -m pytest -m soak tests

mutants:  ## insert small faults into the central modules and list those that the tests miss; half an hour
	@scripts/setup mutants
	nice -n 10 $(bin)/python -m tests.mutants

check: setup  ## check format, lint, types, import rules, docs and protos
	@scripts/check

docs: setup  ## build/site: the pages of docs/ and the docstrings
	$(bin)/mkdocs build --strict

reference: setup  ## write docs/reference from the code: recipe keys, metrics, RPCs and commands
	$(bin)/python -m scripts.reference

proto: setup  ## lint the contract and regenerate the stubs
	$(bin)/buf lint proto
	scripts/proto

fmt: setup  ## format sources and protos, and apply the fixes of the linter
	$(bin)/ruff format .
	$(bin)/ruff check --fix .
	$(bin)/buf format -w proto

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

constraints: setup  ## resolve the pinned versions again
	scripts/constraints

clean:  ## remove the environment, builds and caches, but no runs
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -rf *.egg-info tools/build tools/*.egg-info benchmarks/build benchmarks/*.egg-info services/*/build services/*/*.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
