"""The reference in docs/reference is up to date, and has every recipe key, metric, RPC and command of the code."""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet
from pydantic import BaseModel

from fourfold.algorithm.advantages import ADVANTAGES
from fourfold.algorithm.losses import LOSSES
from fourfold.cli import main as cli_main
from fourfold.config import Config
from fourfold.contract import DESCRIPTOR_SET, PROTO_DIR
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


def test_the_recipe_page_has_every_kind_with_its_formula_and_keys(pages: dict[str, str]) -> None:
    for table, registry in (("algorithm.advantage", ADVANTAGES), ("algorithm.loss", LOSSES)):
        part = _part(pages["recipe.md"], f"[{table}]")
        for kind in registry.kinds():
            definition: Any = registry.find(kind)
            if definition.__module__.startswith("fourfold."):
                own = part.partition(f'### `kind = "{kind}"`\n')[2].partition("\n### ")[0]
                assert definition.model_validate({"kind": kind}).formula() in own
                names = definition.model_fields.keys() - {"kind"}
                assert all(f"| `{name}` |" in own for name in names), kind
                assert names <= field_docs(definition).keys(), kind


def test_the_rules_of_a_table_are_its_errors() -> None:
    source = """
    def check(a, b):
        text = f"a = {a}"
        if a: raise ValueError(f"{text} excludes b = {b!r}; remove one")
    """
    assert error_texts(source) == ["a = ... excludes b = ...; remove one"]


def test_the_metrics_page_has_every_metric_with_its_meaning(pages: dict[str, str]) -> None:
    for name, meaning in METRICS.items():
        assert f"| `{name}` | {meaning.replace('|', chr(92) + '|')} |\n" in pages["metrics.md"]


def test_the_rpc_page_has_every_rpc_message_and_field(pages: dict[str, str]) -> None:
    page = pages["rpcs.md"]
    files = FileDescriptorSet.FromString((PROTO_DIR / DESCRIPTOR_SET).read_bytes()).file
    count = 0
    for file in (file for file in files if file.package.startswith("fourfold.")):
        short = file.package.split(".")[1]
        for service in file.service:
            part = _part(page, f"{short}.{service.name}")
            for method in service.method:
                count += 1
                assert re.search(rf"\| `{method.name}` \| .+ \| .+ \| .{{10,}} \|", part), method.name
        for message in file.message_type:
            _check_message(page, f"{short}.{message.name}", message)
    assert count > 50


def _check_message(page: str, name: str, message: DescriptorProto) -> None:
    own = page.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    assert own, name
    for field in message.field:
        assert re.search(rf"\| {field.number} \| `{field.name}` \| .+ \| .{{3,}} \|", own), f"{name}.{field.name}"
    for inner in message.nested_type:
        if not inner.options.map_entry:
            _check_message(page, f"{name}.{inner.name}", inner)


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
