"""Markdown of the reference: cells, tables, and the docstrings under the fields of a class."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from fourfold.errors import ConfigError


def cell(text: str) -> str:
    """Return a text as one cell of a table: on one line, without column marks and without HTML."""
    parts = [" ".join(part.split()) for part in text.strip().split("\n\n")]
    return escape("\n\n".join(parts)).replace("|", "\\|").replace("\n\n", "<br>")


def escape(text: str) -> str:
    """Return a text in which `<` outside of code begins no HTML tag."""
    # Every second part is between backticks.
    parts = text.split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))


def paragraphs(text: str) -> str:
    """Return a docstring as paragraphs of one line each; indented parts stay as they are."""
    found = []
    for part in inspect.cleandoc(text).split("\n\n"):
        is_code = all(line.startswith("  ") for line in part.splitlines())
        found.append(part if is_code else escape(" ".join(part.split())))
    return "\n\n".join(found)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, empty if it has no rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines]) if lines else ""


def page(title: str, source: str, *blocks: str) -> str:
    """Return a page in ASCII.

    Raises:
        ConfigError: a text of the code is not ASCII.
    """
    note = f"<!-- Generated from {source}: `make reference` writes it. -->"
    text = "\n\n".join([f"# {title}", note, *(block for block in blocks if block)]) + "\n"
    if not text.isascii():
        line = next(line for line in text.splitlines() if not line.isascii())
        raise ConfigError(f"{source}: {line!r} is not ASCII; write it with ASCII characters")
    return text


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the docstrings under the fields of a class and of its bases, by field."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] != cls.__module__.partition(".")[0]:
            continue
        body = _class_body(base)
        for node, following in itertools.pairwise(body):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                match following:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        docs[node.target.id] = inspect.cleandoc(text)
    return docs


def _class_body(cls: type) -> list[ast.stmt]:
    node = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(node, ast.ClassDef)
    return node.body


def error_texts(source: str) -> list[str]:
    """Return the texts of the ValueErrors that Python source raises, with `...` in place of values that vary."""
    found: list[str] = []
    for function in ast.walk(ast.parse(textwrap.dedent(source))):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = _texts_of_names(function)
        for node in ast.walk(function):
            match node:
                case ast.Raise(exc=ast.Call(func=ast.Name(id="ValueError"), args=[text, *_])):
                    found.append(re.sub(r"(\.\.\.\s?)+\.\.\.", "...", _template(text, names)))
    return [text for text in dict.fromkeys(found) if text != "..."]


def _texts_of_names(function: ast.FunctionDef) -> Mapping[str, ast.expr]:
    """Return the variables of a function that are texts, and set once."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values.setdefault(name, []).append(value)
            case ast.Assign(targets=[ast.Tuple(elts=elts)], value=ast.Tuple(elts=parts)):
                for element, part in zip(elts, parts, strict=True):
                    if isinstance(element, ast.Name):
                        values.setdefault(element.id, []).append(part)
    return {name: found[0] for name, found in values.items() if len(found) == 1 and isinstance(found[0], ast.JoinedStr)}


def _template(node: ast.expr, names: Mapping[str, ast.expr]) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_template(value, names) for value in values)
        case ast.FormattedValue(value=ast.Name(id=name)) if name in names:
            return _template(names[name], names)
        case ast.FormattedValue(value=ast.Call(func=ast.Attribute(attr="key"), args=[ast.Constant(value=str(key))])):
            return f"rollout.{key}"
    return "..."
