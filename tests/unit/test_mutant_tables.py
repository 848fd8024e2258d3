"""The tables of `make mutants` name files that exist and give every verdict a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.table import load_modules, load_verdicts


def test_the_tables_are_complete() -> None:
    modules = load_modules()
    assert len(modules) >= 18
    assert {verdict.module for verdict in load_verdicts().values()} <= {module.path for module in modules}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('path = "a.py"\ntests = ["test_a.py", "test_gone.py"]', r"\['test_gone.py'\] missing"),
        ('path = "gone.py"\ntests = ["test_a.py"]', r"\['gone.py'\] missing"),
        ('path = "a.py"\ntests = []', "at least one test file"),
        ('path = "a.py"\ntests = ["test_a.py"]\n[[module]]\npath = "a.py"\ntests = ["test_a.py"]', "needs one row"),
    ],
)
def test_a_row_that_names_no_file_is_an_error(tmp_path: Path, row: str, words: str) -> None:
    for name in ("a.py", "test_a.py"):
        (tmp_path / name).touch()
    (tmp_path / "modules.toml").write_text(f"[[module]]\n{row}\n")
    with pytest.raises(ValueError, match=words):
        load_modules(tmp_path / "modules.toml", tmp_path)


@pytest.mark.parametrize(("verdict", "reason"), [("equivalent", ""), ("harmless", "it is"), ("killed", "by a test")])
def test_a_verdict_needs_a_reason(tmp_path: Path, verdict: str, reason: str) -> None:
    text = f'[[mutant]]\nmodule = "a.py"\nbefore = "x"\nafter = "y"\nverdict = "{verdict}"\nreason = "{reason}"\n'
    (tmp_path / "verdicts.toml").write_text(text)
    with pytest.raises(ValueError, match="with a reason and the verdict"):
        load_verdicts(tmp_path / "verdicts.toml")
