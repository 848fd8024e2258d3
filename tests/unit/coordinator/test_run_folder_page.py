"""The page of the folder of a run has the files that the code names, and the keys of samples.jsonl."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from fourfold.host import program
from fourfold.tracing import export
from fourfold_coordinator.cli import runs
from fourfold_coordinator.launch import run_folder
from fourfold_coordinator.sinks import sink
from fourfold_coordinator.state import experiences, recipe_history, sample_tokens, samples, timeline, trajectory_index

FILES, _, KEYS = (Path(__file__).parents[3] / "docs/run_folder.md").read_text().partition("\n## samples.jsonl\n")
STATE = (experiences, recipe_history, sample_tokens, samples, timeline, trajectory_index)
NAME = re.compile(r"_?([A-Z]\w*_)?(FILE|FOLDER|LOCK|SUFFIX|LATEST)")


def test_the_page_has_every_file() -> None:
    modules = (export, program, run_folder, runs, sink, *STATE)
    names = [str(value) for module in modules for key, value in vars(module).items() if NAME.fullmatch(key)]
    assert len(names) > 20
    rows = " ".join(re.findall(r"^\| (`.*)", FILES, re.MULTILINE))
    known = {part for text in re.findall(r"`([^`]+)`", rows) for part in text.split("/")}
    elsewhere = {
        "latest": "`runs/latest`",
        ".failed": ".failed`",
        ".deleted": ".deleted`",
        "model-step-": "`model-step-N/`",
    }
    assert [name for name in names if name not in known and elsewhere.get(name, name) not in FILES] == []


def test_the_page_has_every_key_of_a_sample() -> None:
    rows = re.findall(r"^\| (`.*?) \|", KEYS, re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == [field.name for field in fields(samples.SampleLine)]
