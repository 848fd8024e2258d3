"""`fourfold sample`: samples and scores answers to the training prompts, and writes them as rows, without a trainer.

recipe, selection -> FILE.run/config.toml, sampling.json -> coordinator --evaluate -> engines, reward services
                                                                   |
        FILE, complete  <-  exit code 0  <-  FILE.run/groups.jsonl <'    killed: the same command continues

Prompts, their order, request seeds and sampling are those of a training run of the recipe at version 0.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pydantic

from fourfold import config as configuration
from fourfold.algorithm.selection import SelectionConfig
from fourfold.cli.numbers import positive_whole
from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.host.disk import make_private_folder
from fourfold.host.program import launch_words, program
from fourfold.model import folder as model_folder

from ..launch.run_folder import locked, pin_sources
from ..launch.run_names import CONFIG_FILE, GROUPS_FILE, LEDGER_FILE, RUN_LOCK, SAMPLING_FILE
from ..state.files import replace_file
from ..state.recipe_history import changed_keys, describe_changes
from ..state.sampled_rows import SampledRows, Sampling, places, write_rows
from .run import (
    RunCommand,
    SignalHandler,
    add_launcher_arguments,
    leave_out_trainer,
    local_gpus,
    make_launcher,
    warn_of_little_room,
)

_NUMBERS: Final = {"threshold": float, "count": int, "min_margin": float}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="TOML file with prompts, [sampling] and [reward]")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE.jsonl", help="file to write; it appears when it is complete"
    )
    parser.add_argument(
        "--select",
        metavar="KIND[,KEY=VALUE]",
        help="answers of a group that become rows: none (all), best, above, top; or pairs: best-worst, all-pairs; with "
        "the keys of [algorithm.selection], such as above,threshold=1; default: that of the recipe",
    )
    parser.add_argument(
        "--prompts",
        type=positive_whole,
        default=0,
        metavar="N",
        help="prompts to sample, in the order of training; default: as many as there are, with weights of sources in "
        "their shares",
    )
    parser.add_argument(
        "--truncated",
        action="store_true",
        help="keep answers that sampling.max_new_tokens has cut; a row teaches that its answer ends where it ends",
    )
    configuration.add_set_option(parser, "model.source=run:sft")
    add_launcher_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Sample, and write the file; return the exit code."""
    out: Path = args.out
    _check_place(out)
    signals = SignalHandler()
    with signals.installed():
        folder = out.with_name(out.name + ".run")
        config = _sampling_config(args, folder)
        asked = Sampling(
            selection=_selection(args.select) if args.select else config.algorithm.selection,
            prompts=args.prompts,
            truncated=args.truncated,
        ).model_dump_json(indent=2)
        model_folder.check(config.model.source)
        warn_of_little_room(out.parent)
        if args.launcher == "local":
            local_gpus(config, evaluate=True)
        make_private_folder(folder, exist_ok=True)
        with locked(folder / RUN_LOCK, "`fourfold sample`"):
            _check_same(folder, config, asked)
            model_folder.resolve(config.model.source, config.data.chat_template)
            launcher = make_launcher(args, config, folder, evaluate=True)
            replace_file(folder / CONFIG_FILE, [configuration.dump(config)])
            replace_file(folder / SAMPLING_FILE, [asked])
            if done := len(places(folder / GROUPS_FILE)):
                print(f"Continuing after {done:,} prompts that are done.")
            return SampleCommand(args, config, folder, launcher, signals).execute()


def _check_place(out: Path) -> None:
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: {out.absolute().parent} is no folder; make it, or give another name")
    if out.exists():
        raise ConfigError(f"--out {out}: it exists already; remove it, or give another name")
    if out.suffix != ".jsonl":
        raise ConfigError(
            f"--out {out}: rows are written as JSON lines; give a name such as {out.with_suffix('.jsonl')}"
        )


def _selection(text: str) -> SelectionConfig:
    kind, *keys = text.split(",")
    tables: dict[str, Any] = {"kind": kind}
    for word in keys:
        key, _, value = word.partition("=")
        try:
            tables[key] = _NUMBERS[key](value)
        except (KeyError, ValueError):
            keys_known = ", ".join(_NUMBERS)
            raise ConfigError(
                f"--select {text}: {word!r} is no KEY=NUMBER with a key of {keys_known}; write it as above,threshold=1"
            ) from None
    try:
        return SelectionConfig.model_validate(tables)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--select {text}: {first['msg'].removeprefix('Value error, ')}") from None


def _sampling_config(args: argparse.Namespace, folder: Path) -> Config:
    """Return the recipe of the sampling: without trackers and the trainer's place, with commits and a date."""
    config = configuration.load(args.recipe, args.set)
    if not config.needs_engines:
        raise ConfigError(
            f"{args.recipe} trains on rows, and has no engines and scorers; give a recipe with prompts_per_step, "
            f"[sampling] and [reward]"
        )
    if config.agents.source != "none":
        raise ConfigError(
            f"{args.recipe}: agents.source = {config.agents.source!r}: rows have one answer to a prompt, and agents "
            f"have several turns; give a recipe without agents"
        )
    if not config.needs_scorer:
        raise ConfigError(f"{args.recipe} has no table [[reward]], and rows are made of scored answers; add one")
    tables = pin_sources(
        configuration.fix_date(config, folder if folder.is_dir() else None).model_dump(exclude_none=True)
    )
    leave_out_trainer(tables)
    return configuration.from_tables(tables, source="fourfold sample")


def _check_same(folder: Path, config: Config, asked: str) -> None:
    """Raise ConfigError if the folder has lines of another recipe or another selection; begin anew without lines."""
    if not places(folder / GROUPS_FILE):
        for file in folder.glob(f"{LEDGER_FILE}*"):  # it knows the data of a command that began here before
            file.unlink()
        return
    old = (folder / CONFIG_FILE).read_text(encoding="utf-8"), (folder / SAMPLING_FILE).read_text(encoding="utf-8")
    changes = changed_keys(tomllib.loads(old[0]), tomllib.loads(configuration.dump(config)))
    if changes or old[1] != asked:
        what = describe_changes(changes) or f"it began with {' '.join(old[1].split())}"
        raise ConfigError(
            f"{folder} was begun by another command: {what}; give that command to continue, remove the folder, or give "
            f"another --out"
        )


class SampleCommand(RunCommand):
    """One execution of `fourfold sample`, from the first process to the last."""

    evaluate = True
    subject = "Sampling"

    def __init__(self, args: argparse.Namespace, config: Config, *rest: Any) -> None:
        """Take the arguments of `RunCommand`; config.toml has what --set says."""
        self._assigned = args.set
        super().__init__(argparse.Namespace(**{**vars(args), "set": []}), config, *rest)

    def print_result(self) -> int:
        out, groups = self._args.out, self._run_dir / GROUPS_FILE
        made = write_rows(groups, out)
        lines = result_lines(made, out if made.rows else None)
        asked = self._dashboard.status.answer_count // self._config.batch.group_size
        if (lost := asked - made.prompts) > 0:
            lines.insert(
                1, f"{lost:,} prompts are left out: services failed too often; {self._run_dir}/logs has the reasons"
            )
        print("\n".join(lines), file=sys.stdout if made.rows else sys.stderr)
        if made.rows:
            groups.unlink()
        return 0 if made.rows else 1

    def print_failure(self, lines: list[str]) -> None:
        print("\n".join([*lines, self.next_command()]), file=sys.stderr)

    def next_command(self) -> str:
        done, args = len(places(self._run_dir / GROUPS_FILE)), self._args
        words = ["sample", str(args.recipe), "--out", str(args.out)]
        words += [word for text in self._assigned for word in ("--set", text)]
        words += ["--select", args.select] if args.select else []
        words += ["--prompts", str(args.prompts)] if args.prompts else []
        words += ["--truncated"] * args.truncated + launch_words(vars(args))
        return f"It continues after {done:,} prompts that are done: {program()} {shlex.join(words)}"


def result_lines(made: SampledRows, out: Path | None) -> list[str]:
    """Return what was sampled, and the file; None: there was nothing to write."""
    mean = f", mean score {made.score_sum / made.answers:.3f}" if made.answers else ""
    lines = [f"{made.prompts:,} prompts, {made.answers:,} scored answers{mean}; {made.rows:,} rows"]
    if made.without_rows:
        lines.append(f"{made.without_rows:,} prompts have no row: nothing of them is selected")
    lines += [f"{count:,} answers are left out: {reason}" for reason, count in sorted(made.left_out.items())]
    if made.left_out["TRUNCATED"]:
        lines.append("TRUNCATED: cut by sampling.max_new_tokens; raise it, or keep them with --truncated")
    lines.append(f"Rows: {out}" if out else "No row was made, and no file is written; change the selection")
    return lines
