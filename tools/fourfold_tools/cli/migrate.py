"""Implements `fourfold import`: converts a run configuration of OpenRLHF, TRL or verl into a recipe."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any, Final

from fourfold.cli.numbers import positive_whole
from fourfold.errors import ConfigError
from fourfold_tools.migrate.common import Options
from fourfold_tools.migrate.shell import MAX_SCRIPT

_SYSTEMS: Final = {"openrlhf": "openrlhf_rules", "trl": "trl_rules", "verl": "verl_rules"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("system", choices=list(_SYSTEMS), help="the system that the configuration is for")
    parser.add_argument("file", help="shell script, YAML file or Python file; - for stdin. Nothing in it is executed")
    parser.add_argument(
        "--define",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of a variable of the script, which replaces the script's own",
    )
    parser.add_argument(
        "--environment",
        action="store_true",
        help="take variables that the script does not set, such as HOME, from the environment",
    )
    parser.add_argument(
        "--rows",
        type=positive_whole,
        default=0,
        metavar="N",
        help="rows of the training data, for `steps`; default: those of a JSONL file that is on this machine",
    )
    parser.add_argument(
        "--gpus",
        type=positive_whole,
        default=0,
        metavar="N",
        help="processes of the trainer, if no launcher names them",
    )
    parser.add_argument(
        "--trainer",
        default="",
        metavar="NAME",
        help="trainer of a file that names none: train_sft, train_ppo_ray ..., or sft, grpo ... of TRL",
    )
    parser.add_argument("--name", default="", help="name of the run")


def main(args: argparse.Namespace) -> int:
    """Print the recipe to stdout, and what was not converted to stderr."""
    source = "stdin" if args.file == "-" else args.file
    text = _read(args.file)
    options = Options(source=source, name=args.name, rows=args.rows, processes=args.gpus, trainer=args.trainer)
    rules: Any = importlib.import_module(f"fourfold_tools.migrate.{_SYSTEMS[args.system]}")
    draft = rules.convert(text, options, _variables(args.define), dict(os.environ) if args.environment else {})
    recipe = draft.text(f"Converted from {args.system}'s {source} by `fourfold import`.")
    print(draft.checked(recipe, source), end="")
    print(draft.report(source), end="", file=sys.stderr)
    return 0


def _read(name: str) -> str:
    """Return the text of a file, or of stdin.

    Raises:
        ConfigError: it cannot be read, is too large, or is no text.
    """
    try:
        if name == "-":
            content = sys.stdin.buffer.read(MAX_SCRIPT + 1)
        else:
            with Path(name).open("rb") as file:
                content = file.read(MAX_SCRIPT + 1)
    except OSError as error:
        raise ConfigError(
            f"{name}: cannot be read ({error.strerror}); give a script, a YAML file, or - for stdin"
        ) from None
    if len(content) > MAX_SCRIPT:
        raise ConfigError(
            f"{name}: more than {MAX_SCRIPT:,} bytes are too many for a configuration; give the script that starts the "
            f"training"
        )
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 (byte {error.start}); give a text file") from None
    if "\0" in text:
        raise ConfigError(f"{name}: has a zero byte at {text.index(chr(0))}; give a text file")
    return text


def _variables(assignments: list[str]) -> dict[str, str]:
    variables = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--define {text}: must be NAME=VALUE, such as HOME=/home/me")
        variables[name] = value
    return variables
