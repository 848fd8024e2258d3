"""The table of `fourfold eval`, and the weights of a run that it finds."""

from __future__ import annotations

import argparse
import json
import re
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fourfold.config import dump, load
from fourfold.errors import ConfigError
from fourfold_coordinator.cli import evaluate
from fourfold_coordinator.cli.evaluate import result_lines
from fourfold_coordinator.launch.exports import export_checkpoint, find_weights
from fourfold_coordinator.launch.run_folder import is_locked, locked, make_run_dir
from fourfold_coordinator.launch.run_names import RUN_LOCK
from fourfold_coordinator.reporting.win_rate import win_rates
from fourfold_coordinator.state.eval_results import EvalRow
from fourfold_coordinator.state.ledger import Ledger
from tests.fakes.toy import make_config
from tests.support.eval_results import make_result


def test_the_table_has_a_row_for_each_set_and_the_results_of_the_harness() -> None:
    sets = [asdict(make_result(name)) for name in ("math", "code")]
    harness = {"arc": {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.125, "sample_len": 4}}
    lines = result_lines({"sets": sets, "score": 0.5, "half_width": None, "lm_eval": harness}, width=200)
    header = "set score pass@1 pass@2 maj@2 answers missing tokens per answer time"
    assert " ".join(lines[1].split()) == header
    row = "math 0.500 +- 0.250 0.500 +- 0.100 0.750 +- 0.100 - 8 0 4 1.2 s"
    assert " ".join(lines[2].split()) == row
    assert " ".join(lines[4].split()) == "mean of sets 0.500"
    assert " ".join(lines[-1].split()) == "arc acc,none 0.500 +- 0.125"


def test_a_narrow_terminal_gets_a_table_for_each_set() -> None:
    sets = [asdict(make_result(name)) for name in ("math", "code")]
    lines = result_lines({"sets": sets, "score": 0.5, "half_width": None, "lm_eval": {}}, width=80)
    assert max(map(len, lines)) <= 80
    assert [line.split() for line in lines[1:3]] == [["set", "math"], ["score", "0.500", "+-", "0.250"]]
    assert "tokens per answer" in lines[8] and lines[-3].split() == ["score", "0.500"]


def test_the_command_for_a_run_by_hand_has_a_held_out_set_and_starts_services() -> None:
    (line,) = re.findall(r"^fourfold eval runs/by-hand (.*)", Path("docs/by_hand.md").read_text(), re.MULTILINE)
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    words = ["runs/by-hand", "--recipe", "recipes/by_hand.toml", *line.split()]
    config = evaluate._evaluation_config(parser.parse_args(words), "MODEL")
    assert config.data.held_out and config.rollout.replicas and all(table.replicas for table in config.reward)


def test_the_engines_of_an_evaluation_have_no_room_for_adapters() -> None:
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    words = ["--recipe", "recipes/lora.toml", "MODEL"]
    config = evaluate._evaluation_config(parser.parse_args(words), "MODEL")
    assert config.trainer.lora.rank and config.weights.adapters == "merged", "no trainer sends any"


def test_an_evaluation_of_a_run_has_the_date_of_its_prompts(tmp_path: Path) -> None:
    run_dir, made = make_run_dir(make_config(tmp_path), "demo", tmp_path)
    (tmp_path / "other.toml").write_text(dump(make_config(tmp_path)))
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    for words in ([], ["--recipe", str(tmp_path / "other.toml")]):
        given = [str(run_dir), "--data", "held_out.jsonl", *words]
        assert evaluate._evaluation_config(parser.parse_args(given), "MODEL").data.date == made.data.date != ""


def test_a_table_of_many_k_has_the_smallest_and_the_largest() -> None:
    result = asdict(make_result("math"))
    result["pass_at"] = [{**result["pass_at"][0], "k": k} for k in (1, 2, 4, 8, 9)]
    lines = result_lines({"sets": [result], "score": 0.5, "half_width": None, "lm_eval": {}}, width=200)
    assert lines[1].split()[:5] == ["set", "score", "pass@1", "pass@9", "maj@9"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--lm-eval-path", "tasks"], "--lm-eval-path tasks has tasks for --lm-eval; name them, or remove it"),
        (["--lm-eval", "mine", "--lm-eval-path", "no/tasks"], "--lm-eval-path: no/tasks is no folder"),
        (["--out", "no/result.json"], "--out: .*/no is no folder"),
        (["--against", "no/evaluation"], "--against no/evaluation: not the folder of an evaluation, .*No such file"),
        (["--out", "tests"], "--out tests: it is a folder; give the name of a file, such as tests/result.json"),
    ],
)
def test_options_without_effect_are_refused_before_anything_starts(words: list[str], text: str) -> None:
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    with pytest.raises(ConfigError, match=text):
        evaluate.main(parser.parse_args(["runs/nothing", *words]))


def test_an_evaluation_opens_no_public_port_of_its_run(tmp_path: Path) -> None:
    recipe, ports = tmp_path / "run.toml", {"public_listen": "127.0.0.1:8441"}
    tables: dict[str, Any] = {"view": ports, "rollout": ports, "gateway": ports}
    recipe.write_text(dump(make_config(tmp_path, **tables)))
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    words = ["--model", "MODEL", "--recipe", str(recipe), "--data", "held_out.jsonl"]
    config = evaluate._evaluation_config(parser.parse_args(words), "MODEL")
    assert (config.view.public_listen, config.rollout.public_listen) == ("", "")
    assert config.gateway.public_listen, "agents of others may make the attempts"
    guessing = str(Path(__file__).parents[3] / "recipes" / "agents_guessing.toml")
    words = [*words[:3], guessing, "--data", "held_out.jsonl", "--set", "gateway.public_listen=127.0.0.1:8441"]
    assert not evaluate._evaluation_config(parser.parse_args(words), "MODEL").gateway.public_listen


def test_weights_are_found_by_step_score_and_age(tmp_path: Path) -> None:
    for name in ("model", "model-step-4", "checkpoints/step-000006", "checkpoints/step-000004"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "report.json").write_text(json.dumps({"steps": 8}))
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for step, score in ((2, 0.9), (4, 0.5), (6, 0.5), (8, 0.4)):
        ledger.add_eval(EvalRow(step, score, None, 8, 0, []))
    ledger.close()
    assert find_weights(tmp_path, "last") == (8, tmp_path / "model")
    assert find_weights(tmp_path, "4") == (4, tmp_path / "model-step-4"), "no checkpoint is exported again"
    assert find_weights(tmp_path, "best") == (6, None), "the newer of equal ones that the run still has"
    with pytest.raises(ConfigError, match=r"--checkpoint 2: .* has the weights of step 4, 6, 8; give one of these"):
        find_weights(tmp_path, "2")


def test_a_run_without_weights_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither an exported model nor a checkpoint; .* run --resume"):
        find_weights(tmp_path, "last")
    (tmp_path / "model-step-4").mkdir()
    with pytest.raises(ConfigError, match=r"--checkpoint best: .* has no held-out score of the steps .*: step 4"):
        find_weights(tmp_path, "best")


@pytest.mark.parametrize(
    ("lock", "text"),
    [("", "its trainer needs 2 nodes; take weights that the run"), (RUN_LOCK, "is in progress and")],
)
def test_a_checkpoint_that_cannot_be_exported_here_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lock: str, text: str
) -> None:
    (tmp_path / "checkpoints" / "step-000004").mkdir(parents=True)
    config = load("recipes/quickstart_gpu.toml", ["placement.trainer_nodes=2", "trainer.ranks=2"])
    (tmp_path / "config.toml").write_text(dump(config))
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    with locked(tmp_path / lock, "it") if lock else nullcontext(), pytest.raises(ConfigError, match=text):
        evaluate._find_model(parser.parse_args([str(tmp_path)]))
    assert capsys.readouterr().out == ""


def test_a_run_is_not_continued_while_a_checkpoint_of_it_is_exported(tmp_path: Path) -> None:
    seen: list[Any] = []

    def wait_ready(*_: Any, **__: Any) -> None:
        seen.append(is_locked(tmp_path / RUN_LOCK))
        raise ConfigError("the trainer does not start")

    supervisor: Any = SimpleNamespace(start=seen.append, wait_ready=wait_ready, stop=lambda: seen.append("stopped"))
    with pytest.raises(ConfigError, match="does not start"):
        export_checkpoint(make_config(tmp_path), tmp_path, 4, (), supervisor)
    assert seen[1:] == [True, "stopped"] and not is_locked(tmp_path / RUN_LOCK)


def write_evaluation(folder: Path, scores: dict[str, list[float | None]], scorer: str = "rm@1") -> Path:
    folder.mkdir()
    (folder / "evaluation.json").write_text(json.dumps({"scorers": [scorer], "model": folder.name}))
    rows = [
        {"set": "math", "prompt_index": index, "prompt": prompt, "task_group": prompt, "score": score}
        for index, (prompt, each) in enumerate(scores.items())
        for score in each
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_win_rate_is_the_mean_over_prompts_of_all_pairs_of_answers(tmp_path: Path) -> None:
    old = write_evaluation(tmp_path / "old", {"a": [1.0, 2.0], "b": [0.0], "c": [5.0], "d": [None]})
    new = write_evaluation(tmp_path / "new", {"a": [2.0, 3.0], "b": [1.0, None], "c": [5.0], "d": [9.0]})
    against = win_rates(new, old)
    (row,) = against["sets"]
    assert row["prompts"] == 3 and row["win_rate"] == pytest.approx((3.5 / 4 + 1 + 1 / 2) / 3)
    lines = result_lines({"sets": [], "score": None, "lm_eval": {}, "against": against}, width=200)
    assert lines[1] == f"Against {old}; equal scores count half:" and lines[3].split()[:2] == ["math", "0.792"]

    other = write_evaluation(tmp_path / "other", {"a": [1.0]}, "rm@2")
    with pytest.raises(ConfigError, match=r"scored by \['rm@2'\], and these by \['rm@1'\]; evaluate both"):
        win_rates(new, other)
    elsewhere = write_evaluation(tmp_path / "elsewhere", {"x": [1.0], "a": [1.0]})
    with pytest.raises(ConfigError, match="no prompt has scored answers in both evaluations"):
        win_rates(new, elsewhere)
