"""Tests the benchmarks that are programs of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold_bench import command
from fourfold_bench.harness import run_script
from fourfold_bench.run_result import RunResult

_SCRIPTS = ("experience_path", "run_result", "trainer_speed")
ROOT = Path(__file__).resolve().parents[3]


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    argv = [sys.executable, "-m", *words]
    return subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_wrong_sizes_are_one_line() -> None:
    done = _run("fourfold_bench.experience_path", "--samples", "9")
    assert done.returncode == 1
    assert done.stderr == "fourfold: --samples 9: it must be a multiple of --group-size 8\n"


def test_a_finished_run_becomes_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "runs" / "small", tmp_path / "result.json"
    run.mkdir(parents=True)
    (run / "config.toml").write_text("name = 'small'\n")
    (run / "report.json").write_text(json.dumps({"model": f"{tmp_path}/runs/small/model"}))
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    (run / "evaluations/step-2").mkdir(parents=True)
    (run / "evaluations/step-2/evaluation.json").write_text('{"score": 1}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fourfold_bench/run_result.py", str(run), "--json", str(out)])
    assert run_script(RunResult()) == 0
    assert capsys.readouterr().out == "run-small: 2 steps\n"
    document = json.loads(out.read_text())
    assert document["parameters"] == {"run": "small", "recipe": "name = 'small'\n"}
    assert document["results"] == {
        "report": {"model": "runs/small/model"},
        "steps": [{"step": 1}, {"step": 2}],
        "evaluations": {"step-2": {"score": 1}},
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", _SCRIPTS)
def test_every_script_explains_itself(name: str) -> None:
    done = _run(f"fourfold_bench.{name}", "--help")
    assert done.returncode == 0 and "--save" in done.stdout, done.stderr[-2000:]


def test_the_readme_has_every_program_and_every_shared_module() -> None:
    text = (ROOT / "benchmarks/README.md").read_text()
    modules = sorted((ROOT / "benchmarks/fourfold_bench").glob("[a-z]*.py"))
    assert [path.name for path in modules if f"`{path.name}`" not in text] == []
    programs = [path for path in modules if "sys.exit(run_script(" in path.read_text()]
    assert [path.stem for path in programs] == list(_SCRIPTS)
    words = [*(f"fourfold bench {name}" for name in command.NAMES), *(f"{name}.py" for name in _SCRIPTS)]
    assert [word for word in words if f"\n| `{word}` | " not in text] == [], "the first table"
