"""`fourfold log RUN_DIR [SINK ...]`: sends the metrics of a run to trackers that do not have them yet."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import get_args

from fourfold import config as configuration
from fourfold.config.schema import SinkName
from fourfold.errors import ConfigError, FourfoldError
from fourfold.text import choices

from ..launch.run_folder import find_run
from ..launch.run_names import CONFIG_FILE
from ..sinks.process import send
from ..sinks.sink import check_sinks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="folder of the run, such as runs/quickstart or runs/latest")
    parser.add_argument(
        "sinks",
        nargs="*",
        metavar="SINK",
        help=f"{', '.join(get_args(SinkName))}; default: those of the run's recipe",
    )
    configuration.add_set_option(parser, "logging.project=math")


def main(args: argparse.Namespace) -> int:
    """Send what is missing to each sink; return the exit code."""
    run_dir = find_run(args.run_dir)
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"{run_dir}: not the folder of a run (no {CONFIG_FILE}); give one of runs/")
    config = configuration.load(run_dir / CONFIG_FILE, args.set)
    for name in args.sinks:
        if name not in get_args(SinkName):
            raise ConfigError(f"no sink has the name {name!r}; {choices(name, get_args(SinkName))}")
    names = args.sinks or config.logging.sinks
    if not names:
        raise ConfigError(
            f"{run_dir}: its recipe has no logging.sinks; name one: fourfold log {shlex.quote(str(run_dir))} "
            f"tensorboard"
        )
    check_sinks(names)
    for name in names:
        try:
            count = send(run_dir, config, name)
        except FourfoldError:
            raise
        except Exception as error:  # any class: the tracker's library has its own errors
            raise ConfigError(f"{name} failed: {type(error).__name__}: {error}") from error
        print(f"{name}: sent {count} steps" if count else f"{name}: has every step already")
    return 0
