"""`fourfold run A.toml B.toml ...`: runs recipes in order, of which each may begin with the run of an earlier one.

check all recipes -> A: runs/a -> B: runs/b -> ...     A failure, Ctrl-C or SIGTERM ends the chain with the present run.
                                                       `--resume` continues with the first run that is not done.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.errors import ConfigError, FourfoldError
from fourfold.host.program import launch_words, program
from fourfold.model import runs
from fourfold.plan.chain import Link, describe_chain, expected_run, load_chain, named, run_sources

from ..launch.run_folder import is_finished
from ..launch.run_names import CONFIG_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A recipe of the chain with its run."""

    recipe: Path
    folder: Path
    state: Literal["new", "stopped", "done"]
    link: Link
    """The recipe, or the config.toml of a run that exists; it is checked and started."""


def run_chain(
    args: argparse.Namespace,
    *,
    check: Callable[[Config, Path], Config],
    start: Callable[[argparse.Namespace], int],
) -> int:
    """Check all recipes, and run them in order; return the exit code, of the first run that did not end well.

    Args:
        args: of `fourfold run`, with several recipes, or with recipes and `--resume`.
        check: checks a recipe and its file, and returns it with its number of steps.
        start: runs the recipe, or resumes the run, of the arguments that it gets; returns the exit code.

    Raises:
        ConfigError: nothing was started, because a recipe is wrong or the folder of a run exists already.
    """
    stages = find_stages(args)
    check_stages(stages, check)
    for number, stage in enumerate(stages, 1):
        title = f"Run {number} of {len(stages)}: {stage.link.config.name} ({stage.link.file})"
        if stage.state == "done":
            print(f"{title} is done already: {stage.folder}", flush=True)
            continue
        print(f"\n{title}", flush=True)
        new = stage.state == "new"
        own = {"recipe": stage.recipe, "resume": None} if new else {"recipe": None, "resume": stage.folder}
        try:
            code = start(argparse.Namespace(**{**vars(args), **own}))
        except FourfoldError as error:
            print(f"fourfold: {error.message}", file=sys.stderr)
            code = 1
        except KeyboardInterrupt:
            print("fourfold: interrupted", file=sys.stderr)
            code = 130
        if code:
            left = [each.link.config.name for each in stages[number:]]
            later = f" Not started: {', '.join(left)}." if left else ""
            print(f"{title} has not ended.{later} To continue here: {continue_command(args)}", file=sys.stderr)
            return code
    return 0


def find_stages(args: argparse.Namespace) -> list[Stage]:
    """Return the recipes with the states of their runs.

    Raises ConfigError: see `load_chain`; or an option is not for several runs, a run exists without `--resume`, or it
    began with the last weights of a run that is to be trained further.
    """
    if args.name:
        raise ConfigError(f"--name {args.name} is for one new run; set `name` in the recipes")
    stages, unfinished = [_stage(link, args) for link in load_chain(args.recipe, args.set)], set[str]()
    for stage in stages:
        for key, source in run_sources(stage.link.config).items():
            name, weights = runs.parse(source, key)
            if stage.state != "new" and not weights and name in unfinished:
                raise ConfigError(
                    f"{stage.folder} began with {source}, whose weights will be others, because {name} is not done. "
                    f"Delete {stage.folder} (fourfold runs delete {stage.folder}), or set another name in "
                    f"{stage.recipe}"
                )
        if stage.state != "done":
            unfinished.add(stage.link.config.name)
    return stages


def _stage(link: Link, args: argparse.Namespace) -> Stage:
    folder = Path("runs") / link.config.name
    file = folder / CONFIG_FILE
    if not file.is_file():
        return Stage(recipe=link.file, folder=folder, state="new", link=link)
    if args.resume is None:
        raise ConfigError(
            f"{link.file}: {folder} exists. To continue with the runs that are not done: {continue_command(args)}. To "
            f"begin again, delete it (fourfold runs delete {folder}) or set another name"
        )
    config = configuration.load(file, args.set)
    # --set data.passes=3 extends a run whose config.toml has the steps of fewer passes.
    done = is_finished(folder, config) and (not args.set or config == configuration.load(file))
    return Stage(
        recipe=link.file,
        folder=folder,
        state="done" if done else "stopped",
        link=Link(file=file, config=config),
    )


def check_stages(stages: Sequence[Stage], check: Callable[[Config, Path], Config]) -> None:
    """Check the recipes of all runs that are not done, before anything is started; print what they take together."""
    planned = list[Link]()
    with runs.expect_runs() as expect:
        for stage in stages:
            if stage.state == "done":
                continue
            with named(stage.recipe):
                config = check(stage.link.config, stage.link.file)
                expect(config.name, expected_run(config))
            planned.append(Link(file=stage.recipe, config=config))
        if planned:
            print(f"Checked {describe_chain(planned)}", flush=True)


def continue_command(args: argparse.Namespace) -> str:
    """Return the command that continues the chain with the first run that is not done."""
    words = ["run", *map(str, args.recipe), "--resume"]
    words += [word for each in args.set for word in ("--set", each)]
    return f"{program()} {shlex.join([*words, *launch_words(vars(args))])}"
