"""The page of the commands, from the parsers of `fourfold`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, Final

from fourfold.cli.main import build_parser, commands
from scripts.reference.page import cell, escape, page, table

_INTRODUCTION: Final = """\
`fourfold COMMAND --help` prints the same texts. Exit codes: 0 success; 1 error, with a message on stderr; 2 wrong
usage; 130 interrupted. Commands that need a distribution which is not installed say which `pip install` adds it."""


def cli_page() -> str:
    """Return docs/reference/cli.md."""
    blocks = []
    for name, text in commands().items():
        blocks += list(_command(f"fourfold {name}", build_parser(name), text, "##"))
    return page("Commands", "the parsers of the commands", _INTRODUCTION, *blocks)


def _command(name: str, parser: argparse.ArgumentParser, text: str, level: str) -> Iterator[str]:
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    inner = [action for action in actions if isinstance(action, argparse._SubParsersAction)]
    rows = [[cell(_names(action)), _default(action), cell(_help(action))] for action in actions if action not in inner]
    usage = " ".join([name, *(_usage(action) for action in actions)])
    blocks = [
        f"{level} {name}",
        escape(f"{text[:1].upper()}{text[1:]}".rstrip(".") + "." if text else ""),
        f"```\n{usage}\n```",
        escape(parser.epilog or ""),
        table(["argument", "default", "meaning"], rows),
    ]
    yield "\n\n".join(block for block in blocks if block)
    for action in inner:
        texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for choice, each in action.choices.items():
            yield from _command(f"{name} {choice}", each, texts.get(choice, each.description or ""), level + "#")


def _usage(action: argparse.Action) -> str:
    """Return an argument as it is written in a command line."""
    if isinstance(action, argparse._SubParsersAction):
        return "{" + ",".join(action.choices) + "}"
    value = _value(action)
    text = f"{action.option_strings[-1]} {value}".strip() if action.option_strings else value
    optional = action.nargs in ("?", "*") if not action.option_strings else not action.required
    if action.nargs in ("*", "+") or isinstance(action, argparse._AppendAction):
        text += " ..."
    return f"[{text}]" if optional else text


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if isinstance(action.metavar, tuple):
        return " ".join(action.metavar)
    if action.choices is not None and action.metavar is None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.metavar or action.dest.upper()


def _names(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{_value(action)}`"
    return ", ".join(f"`{name} {_value(action)}`".replace(" `", "`") for name in action.option_strings)


def _default(action: argparse.Action) -> str:
    value: Any = action.default
    # argparse calls a positional argument with nargs = "*" required, unless it has a default.
    if action.required and action.nargs not in ("?", "*"):
        return "*required*"
    if value is None or value is argparse.SUPPRESS or value == [] or value == "" or action.nargs == 0:
        return ""
    return f"`{value}`"


def _help(action: argparse.Action) -> str:
    """Return the help of an argument with its placeholders, such as %(default)s, filled in."""
    text = action.help or ""
    return text % {**vars(action), "prog": "fourfold"} if "%" in text else text
