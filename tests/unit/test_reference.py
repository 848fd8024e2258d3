"""The reference in docs/reference is up to date, and has every recipe key and command of the code."""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from fourfold import metrics
from fourfold.cli import main as cli_main
from fourfold.config import Config
from fourfold.metrics import METRICS
from scripts.reference import FOLDER, PAGES
from scripts.reference.page import error_texts, field_docs

ROOT = Path(__file__).resolve().parents[2]
MAX_PAGE_BYTES = 1_000_000


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {name: (FOLDER / name).read_text() for name in PAGES}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_up_to_date_and_small(name: str, pages: dict[str, str]) -> None:
    assert pages[name] == PAGES[name](), "run `make reference`"
    assert pages[name].isascii()
    assert len(pages[name]) < MAX_PAGE_BYTES


def _keys(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield table, key and docstring of every key, without what the generator knows of tables."""
    docs = field_docs(model)
    for name, info in model.model_fields.items():
        inner = _model_in(info.annotation)
        if inner is None:
            yield path, name, docs.get(name, "")
        elif "kind" not in inner.model_fields or inner.model_fields["kind"].annotation is not str:
            yield from _keys(inner, f"{path}.{name}".lstrip("."))


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_model_in(argument) for argument in getattr(annotation, "__args__", ()))
    return next((model for model in inner if model is not None), None)


def _part(page: str, heading: str) -> str:
    """Return the text from the heading that contains `heading` to the next one of its level."""
    found = re.search(rf"^(##+) [^\n]*{re.escape(heading)}[^\n]*\n(.*?)(?=^##[ ]|\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, f"no heading {heading}"
    return found[2]


def test_the_recipe_page_describes_every_key(pages: dict[str, str]) -> None:
    keys = list(_keys(Config))
    assert len(keys) > 200
    for table, key, text in keys:
        part = _part(pages["recipe.md"], f"[{table}]" if table else "Top level")
        assert f"`{key}`" in part, f"[{table}] {key}"
        assert len(text) > 5, f"[{table}] {key} has no docstring"


def test_the_rules_of_a_table_are_its_errors() -> None:
    source = """
    def check(a, b):
        text = f"a = {a}"
        if a: raise ValueError(f"{text} excludes b = {b!r}; remove one")
    """
    assert error_texts(source) == ["a = ... excludes b = ...; remove one"]


def test_the_page_of_commands_has_every_command_and_argument(pages: dict[str, str]) -> None:
    # From the files of this tree: an environment that several trees share may have commands of another one.
    registered: set[str] = set()
    for path in (
        *ROOT.glob("services/*/pyproject.toml"),
        ROOT / "tools/pyproject.toml",
        ROOT / "benchmarks/pyproject.toml",
    ):
        project = tomllib.loads(path.read_text())["project"]
        registered |= project.get("entry-points", {}).get("fourfold.commands", {}).keys()
    assert {"run", "bench", "conformance"} <= registered <= cli_main.commands().keys()
    for name in cli_main.commands():
        _check_command(pages["cli.md"], f"fourfold {name}", cli_main.build_parser(name))


def _check_command(page: str, name: str, parser: argparse.ArgumentParser) -> None:
    _, found, rest = page.partition(f"# {name}\n")
    assert found, name
    own = rest.partition("\n## ")[0].partition("\n### ")[0]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice, inner in action.choices.items():
                _check_command(page, f"{name} {choice}", inner)
        if action.nargs == "*":
            assert f"`{action.metavar or action.dest.upper()}`".replace("|", "\\|") + " | *required*" not in own
        for option in action.option_strings:
            assert f"{option}" in own or option in ("-h", "--help"), f"{name} {option}"


def test_every_name_has_a_unit_and_a_meaning() -> None:
    constants = [v for k, v in vars(metrics).items() if k.isupper() and isinstance(v, str)]
    assert sorted(constants) == sorted(METRICS)
    for name, meaning in METRICS.items():
        assert name.count("/") == 1, name
        assert name == name.lower()
        assert len(meaning) > 10
        unit = meaning.partition(":")[0]
        if unit != meaning:
            assert len(unit) < 25, f"{name}: the unit comes before the colon"


def test_pages_name_metrics_that_exist() -> None:
    groups = "|".join({name.partition("/")[0] for name in METRICS})
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    named = [
        (page.name, name) for page in pages for name in re.findall(f"`((?:{groups})/[a-z0-9_]+)`", page.read_text())
    ]
    assert len(named) > 100
    assert [(page, name) for page, name in named if name not in METRICS] == []
