"""Tests the checks of a recipe before anything is started, with the real tokenizer and real worker processes."""

from __future__ import annotations

import importlib.metadata
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from fourfold import config as configuration
from fourfold.errors import ConfigError
from fourfold.plan.preflight import Preflight, check_recipe
from fourfold.plan.report import describe
from fourfold_coordinator.rewards import data_check
from fourfold_coordinator.sinks import sink
from fourfold_rollout.check import check_parsers
from fourfold_tools.step_time import guess

RECIPE = """\
name = "own"
steps = 3
[model]
source = "builtin:smollm2-135m-instruct"
max_context_tokens = 128
[data.train]
path = "rows.jsonl"
[sampling]
max_new_tokens = 8
[batch]
prompts_per_step = 2
group_size = 2
tokens_per_micro_batch = 512
[reward]
function = "mine.py:reward"
"""
ROWS = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(6)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    write_rows(tmp_path, ROWS)
    write_reward(tmp_path, "return float(sample.completion == sample.answer)")
    return tmp_path


def write_rows(folder: Path, rows: Sequence[object]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_reward(folder: Path, body: str) -> None:
    (folder / "mine.py").write_text(f"def reward(sample):\n    {body}\n")


def check(folder: Path, *assignments: str) -> Preflight:
    path = folder / "recipe.toml"
    return check_recipe(configuration.load(path, assignments), path, assignments)


def test_the_plan_says_which_date_the_template_writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_check, "chat_template", lambda _: "{{ strftime_now('%d %b %Y') }}")

    def notes(*assignments: str) -> list[str]:
        found = Preflight(configuration.load(folder / "recipe.toml", assignments))
        data_check.check_data(found)
        return found.notes["data"]

    assert notes('data.date="2026-11-28"')[0] == "The chat template writes the date: 2026-11-28 (data.date)."
    assert notes()[0].endswith("(now; a run writes the date on which it begins).")
    assert len(notes("data.chat=false")) == 1


def test_the_plan_says_how_often_each_source_is_drawn(folder: Path) -> None:
    mixture = '[[data.train]]\npath = "rows.jsonl"\nweight = 3\n[[data.train]]\npath = "few.jsonl"\nweight = 1\n'
    (folder / "few.jsonl").write_text(
        '{"question": "short", "answer": "1"}\n{"question": "word ' + "word " * 40 + '"}\n'
    )
    (folder / "recipe.toml").write_text(RECIPE.replace('[data.train]\npath = "rows.jsonl"\n', mixture))
    found = check(folder, "data.max_prompt_tokens=60", "steps=16")
    assert found.notes["data"][1:] == [
        "rows: 6 training prompts. The run draws 24 prompts: 4 passes over them.",
        "few: 1 training prompts. The run draws 8 prompts: 8 passes over them.",
        "1 rows have more than data.max_prompt_tokens tokens, and are left out.",
    ]
    few = check(folder, "data.max_prompt_tokens=60", "steps=1", "data.train.1.weight=0.01")
    assert few.notes["data"][1] == "rows: 6 training prompts. The run draws 2 prompts: 33.2% of them."
    plan = " ".join(describe(found.config, found=found).split())
    assert "a mixture of 75.0% rows (all rows of rows.jsonl); 25.0% few (all rows of few.jsonl), exact in" in plan
    pool = " ".join(
        describe(configuration.load(folder / "recipe.toml", ["data.train=[{path='a'}, {path='b'}]"])).split()
    )
    assert "one pool of a (all rows of a); b (all rows of b), as chat" in pool


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (['data.prompt_field="text"'], r"^--set data.prompt_field  rows.jsonl, row 0: no column 'text'; it has "),
        (['data.train.path="nowhere.jsonl"'], r"^--set data.train.path  path = 'nowhere.jsonl' does not exist"),
        (["model.max_context_tokens=16"], r"^--set model.max_context_tokens  rows.jsonl: no prompt is left: all 6"),
        (
            ['data.holdout={field="kind", groups=1}'],
            r"^--set data.holdout  data.holdout.field = 'kind': rows.jsonl, row 0 has no ",
        ),
        (['reward.function="mine.py:rewad"'], r"^--set reward.function  reward.function: .*did you mean 'reward'"),
        (['reward.function="exact_mach"'], r"^--set reward.function  reward.function = .*did you mean 'exact_match'"),
        (['reward.where={level=["1"]}'], r"row 0 of the data has no scorer: .*change `where`"),
    ],
)
def test_mistakes_name_the_key_and_its_line(folder: Path, assignments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(folder, *assignments)


def test_a_function_that_names_the_answer_column_of_a_source_gets_it(folder: Path) -> None:
    write_rows(folder, [{"question": row["question"], "solution": row["answer"]} for row in ROWS])
    (folder / "mine.py").write_text("def reward(completions, solution):\n    return [float(len(solution[0]))]\n")
    assert "score 1, 1, 1, 1." in check(folder, 'data.train.answer_field="solution"').notes["reward"][0]


def test_a_function_that_raises_shows_error_file_and_line(folder: Path) -> None:
    write_reward(folder, "return 1 / len(sample.completion) * missing")
    with pytest.raises(
        ConfigError,
        match=r"recipe.toml:15  .*fails for every .*Row 0: .*NameError: name 'missing' is not defined .mine.py:2.",
    ):
        check(folder)


def test_a_function_that_sometimes_raises_is_a_warning(folder: Path) -> None:
    write_reward(folder, "return 4.0 / int(sample.answer)")
    (warning,) = check(folder).warnings
    assert "mine.py:reward fails for the reference answer of row 0" in warning and "ZeroDivisionError" in warning


def test_verifiers_for_which_a_reference_answer_is_no_completion_are_no_warning(folder: Path) -> None:
    form = '{function="format", options={pattern="<a>.*</a>"}, name="form"}'
    length = '{function="length", options={target_tokens=8, max_tokens=16}, name="length"}'
    mine = '{function="mine.py:reward", name="mine"}'
    write_reward(folder, "return 0.0")
    reads_ids = "def reward(completions, completion_ids):\n    return [float(len(ids) > 0) for ids in completion_ids]\n"
    (folder / "ids.py").write_text(reads_ids)
    ids = '{function="ids.py:reward", name="ids"}'
    assert check(folder, f'reward=[{mine}, {form}, {length}, {ids}, {{function="exact_match"}}]').warnings == []
    (warning,) = check(folder, f"reward=[{mine}, {form}]").warnings
    assert "mine.py:reward gives 0 to the reference answer of each of 4 rows, such as '0'" in warning


def test_a_sink_without_its_library_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sink._LIBRARIES, "wandb", "no_such_module")
    config = configuration.load(folder / "recipe.toml", ['logging.sinks=["wandb"]'])
    with pytest.raises(ConfigError, match='the sink "wandb" needs the module'):
        sink.check_logging(Preflight(config))
    assert _registered("coordinator", "logging") == "fourfold_coordinator.sinks.sink:check_logging"


def test_a_parser_that_vllm_does_not_have_is_found(folder: Path) -> None:
    for key, wrong, near in (("tool_parser", "hermess", "hermes"), ("reasoning_parser", "deepseek_r2", "deepseek_r1")):
        config = configuration.load(folder / "recipe.toml", [f'rollout.{key}="{wrong}"'])
        with pytest.raises(
            ConfigError, match=f"rollout.{key} = '{wrong}': the installed vLLM .* did you mean `{near}`"
        ):
            check_parsers(Preflight(config))
        check_parsers(Preflight(configuration.load(folder / "recipe.toml", [f'rollout.{key}="{near}"'])))
    assert _registered("rollout", "rollout") == "fourfold_rollout.check:check_parsers"


def _registered(distribution: str, name: str) -> str:
    """Return a check of a distribution as its metadata will have it."""
    path = Path(__file__).parents[3] / "services" / distribution / "pyproject.toml"
    found: str = tomllib.loads(path.read_text())["project"]["entry-points"]["fourfold.checks"][name]
    return found


def test_a_check_that_cannot_be_loaded_names_its_distribution(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "broken_plug_in.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(folder)
    broken = importlib.metadata.EntryPoint("mine", "broken_plug_in:check", "fourfold.checks")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [broken])
    with pytest.raises(ConfigError, match=r"mine = broken_plug_in:check cannot be loaded \(RuntimeError: no licence\)"):
        check(folder)


def test_more_than_two_hours_on_a_cpu_are_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guess, "cpu_flops", lambda: 1e11)
    for steps, warned in ((3, False), (30_000, True)):
        found = check(folder, f"steps={steps}")
        plan = " ".join(describe(found.config, found=found).split())
        assert ("on this CPU, more than two hours, by the guess below: lower steps" in plan) == warned


def test_prompts_without_room_for_an_answer_are_a_warning(folder: Path) -> None:
    write_rows(folder, [*ROWS, {"question": "long " * 60, "answer": "1"}])
    (warning,) = check(folder, "sampling.max_new_tokens=32", "model.max_context_tokens=104").warnings
    assert warning.startswith("1 of 7 training prompts leave less than sampling.max_new_tokens = 32 tokens")


def test_data_without_answers_try_no_reward(folder: Path) -> None:
    write_rows(folder, [{"question": "Write a poem."}])
    assert "reward" not in check(folder).notes


def test_a_function_of_a_service_by_hand_is_tried_if_its_file_is_here(folder: Path) -> None:
    assert "score 1, 1, 1, 1." in check(folder, "reward.replicas=0").notes["reward"][0]
    (folder / "mine.py").unlink()
    found = check(folder, "reward.replicas=0")
    assert found.warnings == []
    assert found.notes["reward"][0].startswith("mine.py:reward could not be tried on this machine: ")


def test_a_function_of_a_service_by_hand_that_always_fails_is_a_warning(folder: Path) -> None:
    write_reward(folder, "return missing")
    found = check(folder, "reward.replicas=0")
    (warning,) = found.warnings
    assert warning.startswith("reward.function = 'mine.py:reward' fails for every reference answer that it was tried")
    assert "NameError: name 'missing' is not defined" in warning and "reward" not in found.notes


def test_held_out_prompts_that_are_trained_and_evaluations_that_never_come_are_warnings(folder: Path) -> None:
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS[:2], {"question": "new"}]))
    with pytest.raises(ConfigError, match=r"of the held-out set test are .*or set data.eval_overlap = .warn."):
        check(folder, 'data.eval=[{path="test.jsonl"}]')
    trained, interval = check(folder, 'data.eval=[{path="test.jsonl"}]', "data.eval_overlap=warn").warnings
    assert interval.startswith("evaluation.every_steps = 10 is above steps = 3, so that only the first and the last")
    assert trained.startswith("2 of 3 prompts of the held-out set test are training prompts, too")
    keys = ("data.eval_overlap=warn", "evaluation.every_steps=3")
    assert len(check(folder, 'data.eval=[{path="test.jsonl"}]', *keys).warnings) == 1


def test_a_verifier_without_the_answers_that_it_needs_is_refused(folder: Path) -> None:
    write_rows(folder, [{"question": "1+1?", "tested": "assert f()"}, {"question": "1+2?", "answer": ""}])
    for name in ("exact_match", "last_number", "math_verify"):
        with pytest.raises(
            ConfigError, match=rf"'{name}' needs a reference answer.*and no row of the training data has"
        ):
            check(folder, f"reward.function={name}")
    assert check(folder, "reward.function=mine.py:reward").warnings == []
    code = ("reward.function=code_tests", "reward.evaluate_text=true")
    with pytest.raises(ConfigError, match=r"'code_tests' needs a reference answer"):
        check(folder, *code)
    (warning,) = check(folder, *code, "reward.options={field='tested'}").warnings
    assert warning.startswith("1 of 2 rows of the training data have no reference answer, which code_tests needs")
    write_rows(folder, [{"question": "1+1?", "answer": "two"}, {"question": "1+2?", "answer": "3"}])
    assert check(folder, "reward.function=exact_match").warnings == []
    (warning,) = check(folder, "reward.function=last_number").warnings
    assert warning.startswith(
        "1 of 2 rows of the training data have no reference answer with a number, which last_numb"
    )
    with pytest.raises(ConfigError, match=r"and no row of held-out set test has one; .*\(there are: solution\)"):
        (folder / "test.jsonl").write_text('{"question": "5+5?", "solution": "10"}\n')
        check(folder, "reward.function=exact_match", 'data.eval=[{path="test.jsonl"}]')


def test_a_context_longer_than_the_model_is_refused(folder: Path) -> None:
    config = configuration.load(
        folder / "recipe.toml", ["model.max_context_tokens=9000", "batch.tokens_per_micro_batch=9000"]
    )
    with pytest.raises(ConfigError, match=r"model.max_context_tokens = 9000, but .* was made for at most 8192 tokens"):
        describe(config)


_AGENTS = ("environment.replicas=1", "gateway.replicas=1", 'agents.source="tasks"', 'rollout.tool_parser="hermes"')


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (['source="none.py:Env"'], r"environment.source: .*none.py"),
        (['source="mine.py:Env"'], r"\[environment\] cannot be loaded: .*defines no 'Env'"),
        (['source="broken.py:Env"'], r"\[environment\] cannot be loaded: .*no such module here"),
        (['tools=["mine.py:reward"]', 'source="mine.py:reward"'], r"\[environment\] cannot be loaded: .*reward"),
        (['tools=["builtin:python"]'], r'agents.reward = "agent"; set agents.reward = "service"'),
        (['kind="gymnasium"', 'source="NoSuch-v1"'], r"\[environment\] cannot be loaded: "),
        (['kind="openenv"', 'source="http://127.0.0.1:9"'], r"environment.network = false; set it to true"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_found_before_a_run(folder: Path, keys: list[str], words: str) -> None:
    (folder / "broken.py").write_text("raise ImportError('no such module here')\n")
    assignments = [*_AGENTS, 'agents.reward="agent"']
    with pytest.raises(ConfigError, match=words):
        check(folder, *assignments, *(f"environment.{key}" for key in keys))


def test_tools_that_can_be_loaded_pass(folder: Path) -> None:
    (folder / "mine.py").write_text('def add(a: int, b: int) -> int:\n    """Add."""\n    return a + b\n')
    assignments = [*_AGENTS, 'agents.reward="service"']
    check(folder, *assignments, 'environment.tools=["mine.py:add"]', 'reward.function="last_number"')
