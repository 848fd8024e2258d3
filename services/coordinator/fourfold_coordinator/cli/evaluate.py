"""`fourfold eval`: evaluates the model of a run, or a model folder, on held-out sets, without a trainer.

run or model folder -> evaluations/<name>/config.toml -> coordinator --evaluate -> engines, reward services
                                                              |
   table, evaluation.json, answers.jsonl  <-  exit code 0  <--'

Prompts, request seeds, sampling, scorers and estimators are those of the evaluations during a run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.host.process import Supervisor
from fourfold.install import install_command
from fourfold.model import folder as model_folder
from fourfold.model import runs
from fourfold.text import align_columns, format_interval, of_measure, unit_of

from ..launch.exports import check_exportable, export_checkpoint, find_weights
from ..launch.run_folder import find_run, locked, make_run_dir
from ..launch.run_names import (
    ANSWERS_FILE,
    CONFIG_FILE,
    EVALUATION_FILE,
    EVALUATIONS_FOLDER,
    HARNESS_FILE,
    MODEL_FOLDER,
    REPORT_FILE,
    RUN_LOCK,
)
from ..reporting.win_rate import read_evaluation, win_rates
from ..state.files import replace_file
from .run import (
    RunCommand,
    SignalHandler,
    add_launcher_arguments,
    leave_out_trainer,
    local_gpus,
    make_launcher,
    warn_of_little_room,
)

_FILE_WIDTH: Final = 200  # columns of output that is no terminal
_MOST_SIZES: Final = 3  # most values of k in the table; of more, it shows the smallest and the largest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN_DIR", help="folder of a run, such as runs/quickstart")
    parser.add_argument(
        "--checkpoint",
        metavar="STEP|best|last",
        help="weights of the run to evaluate: after a step, those with the best held-out score, or the last ones "
        "(default); a checkpoint that is not exported yet is exported first",
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="FOLDER",
        help="model folder, hf:OWNER/NAME or builtin:NAME, in place of a run",
    )
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="TOML file; default: config.toml of the run")
    configuration.add_set_option(parser, "evaluation.samples_per_prompt=8")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="FILE",
        help="a held-out set beside those of the recipe, with its columns; may be repeated",
    )
    parser.add_argument(
        "--lm-eval",
        default="",
        metavar="TASK[,TASK]",
        help="tasks of lm-evaluation-harness to run on the engines, too; needs 'fourfold-coordinator[lm-eval]'",
    )
    parser.add_argument(
        "--lm-eval-path", default="", metavar="FOLDER", help="folder with tasks of your own for --lm-eval"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FOLDER",
        help="folder of an earlier evaluation by the same recipe: how often these answers score higher than those",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the result here, too")
    add_launcher_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Evaluate; return the exit code."""
    if (args.run is None) == (not args.model) or (args.model and (args.recipe is None or args.checkpoint)):
        print(
            "fourfold eval: give RUN_DIR, with or without --checkpoint, or --model FOLDER and --recipe FILE",
            file=sys.stderr,
        )
        return 2
    if args.lm_eval_path and not args.lm_eval:
        raise ConfigError(f"--lm-eval-path {args.lm_eval_path} has tasks for --lm-eval; name them, or remove it")
    for flag, folder in (("--lm-eval-path", args.lm_eval_path), ("--out", args.out and args.out.absolute().parent)):
        if folder and not Path(folder).is_dir():
            raise ConfigError(f"{flag}: {folder} is no folder; make it, or name another one")
    if args.out and args.out.is_dir():
        raise ConfigError(f"--out {args.out}: it is a folder; give the name of a file, such as {args.out}/result.json")
    if args.against:
        read_evaluation(args.against)
    if args.lm_eval and importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"--lm-eval needs a package: {install_command('fourfold-coordinator[lm-eval]')}")
    signals = SignalHandler()
    with signals.installed():
        warn_of_little_room(Path.cwd())
        if args.run is not None and (find_run(args.run) / CONFIG_FILE).is_file():
            config = _evaluation_config(args, "")
            if not config.needs_engines:
                return _evaluate_rows(args, config)
        step, model, root = _find_model(args)
        config = _evaluation_config(args, model)
        model_folder.check(config.model.source)
        if args.launcher == "local":
            local_gpus(config, evaluate=True)
        folder, config = make_run_dir(config, config.name if step is None else f"step-{step}", root)
        with locked(folder / RUN_LOCK, "`fourfold eval`"):
            try:
                model_folder.resolve(config.model.source, config.data.chat_template)
                if args.lm_eval:
                    asked = {"tasks": args.lm_eval.split(","), "include_path": args.lm_eval_path}
                    replace_file(folder / HARNESS_FILE, [json.dumps(asked)])
                launcher = make_launcher(args, config, folder, evaluate=True)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            return EvalCommand(args, config, folder, launcher, signals, step=step).execute()


def _evaluate_rows(args: argparse.Namespace, config: Config) -> int:
    """Measure a run of rows by its trainer."""
    from .evaluate_rows import evaluate_rows  # loads the modules of the training, which other evaluations do not need

    if args.lm_eval:
        raise ConfigError(f"--lm-eval {args.lm_eval} asks engines, which a run of rows has not; give --recipe FILE")
    if args.against:
        raise ConfigError(
            f"--against {args.against} compares sampled answers, which a run of rows has not; give --recipe"
        )
    run_dir = find_run(args.run)
    step, _ = find_weights(run_dir, args.checkpoint or "last")
    folder, config = make_run_dir(config, f"step-{step}", run_dir / EVALUATIONS_FOLDER)
    try:
        result = evaluate_rows(config, run_dir, step, Supervisor(folder / "logs"))
    except (ConfigError, KeyboardInterrupt):  # other errors name a log in the folder
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return _show(args, folder, {"model": str(run_dir), "step": step, **result})


def _show(args: argparse.Namespace, folder: Path, result: Mapping[str, Any]) -> int:
    """Write a result, and print it; return the exit code."""
    lines = [json.dumps(result, indent=2, ensure_ascii=False) + "\n"]
    for target in (folder / EVALUATION_FILE, *([args.out] if args.out else [])):
        replace_file(target, lines)
    shown = result_lines(result, width=shutil.get_terminal_size((_FILE_WIDTH, 24)).columns)
    shown += ["", f"Result: {folder / EVALUATION_FILE}"]
    if (answers := folder / ANSWERS_FILE).exists():
        shown.append(f"Answers: {answers}")
    print("\n".join(shown))
    if result["unscored"]:
        print(
            f"No answer to {', '.join(result['unscored'])} has a score; {ANSWERS_FILE} has the reasons (`dropped`)",
            file=sys.stderr,
        )
        return 1
    return 0


def _find_model(args: argparse.Namespace) -> tuple[int | None, str, Path]:
    """Return the step of the weights (None: not of a run), their folder, and the folder for evaluations."""
    if args.run is None:
        return None, args.model, Path(EVALUATIONS_FOLDER)
    run_dir = find_run(args.run)
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{run_dir}: not the folder of a run (no {CONFIG_FILE}); give one of runs/, or a model folder with --model "
            f"{run_dir} --recipe FILE"
        )
    step, folder = exported_weights(run_dir, args.checkpoint or "last")
    return step, str(folder), run_dir / EVALUATIONS_FOLDER


def exported_weights(run_dir: Path, wanted: str) -> tuple[int, Path]:
    """Return the step and the model folder of weights of a run; export them if they are a checkpoint alone.

    Raises:
        ConfigError: see `find_weights`; or the run is in progress, and has not exported them.
    """
    step, folder = find_weights(run_dir, wanted)
    if folder is None:
        config = configuration.load(run_dir / CONFIG_FILE)
        check_exportable(config, run_dir, step)
        print(f"Exporting the checkpoint of step {step} to {run_dir / f'model-step-{step}'} ...", flush=True)
        gpus = local_gpus(config).get("trainer-0", ())
        folder = export_checkpoint(config, run_dir, step, gpus, Supervisor(run_dir / "logs"))
    return step, folder


def newest_model(run_dir: Path) -> Path:
    """Return the folder of the newest weights of a run; export them if they are a checkpoint alone.

    If the export is not possible, for example while the run is in progress, return the newest exported folder. Raises
    ConfigError if there is none.
    """
    model = run_dir / MODEL_FOLDER
    if model.is_dir() and not (run_dir / REPORT_FILE).is_file():  # the last export comes before the report
        return model
    try:
        return exported_weights(run_dir, "last")[1]
    except ConfigError as error:
        exported = [(step, folder) for step, folder in runs.all_weights(run_dir).values() if folder]
        if not exported:
            raise
        step, folder = max(exported)
        print(f"Taking {folder}, of step {step}: {error.message}", file=sys.stderr)
        return folder


def _evaluation_config(args: argparse.Namespace, model: str) -> Config:
    """Return the recipe of the evaluation: with the model, if one is given, more held-out sets, and no trackers."""
    run_dir = args.run and find_run(args.run)
    recipe = args.recipe or run_dir / CONFIG_FILE
    tables = configuration.fix_date(configuration.load(recipe, args.set), run_dir).model_dump(exclude_none=True)
    tables["model"]["source"] = model or tables["model"]["source"]
    leave_out_trainer(tables)
    for name in ("view", "rollout", *(["gateway"] if tables["environment"]["replicas"] else [])):
        tables[name]["public_listen"] = ""  # the run itself may listen on these addresses
    tables["data"]["eval"] = [*tables["data"]["eval"], *({"path": path} for path in args.data)]
    config = configuration.from_tables(tables, source="fourfold eval")
    if not config.needs_engines and args.run is None:
        raise ConfigError(
            f"{recipe} trains on rows, which the trainer of a run measures: give its folder, RUN_DIR; or --recipe FILE "
            f"with prompts_per_step, [sampling], [reward] and held-out prompts"
        )
    if not config.data.held_out and not args.lm_eval:
        raise ConfigError(f"{recipe} has no held-out set; add [[data.eval]] or [data.holdout], or pass --data FILE")
    return config


class EvalCommand(RunCommand):
    """One execution of `fourfold eval`, from the first process to the last."""

    evaluate = True
    subject = "Evaluation"

    def __init__(self, *args: Any, step: int | None) -> None:
        """Take the arguments of `RunCommand`, and the step of the weights; None if they are of no run."""
        super().__init__(*args)
        self._step = step

    def print_result(self) -> int:
        result = json.loads((self._run_dir / EVALUATION_FILE).read_text(encoding="utf-8"))
        result = {"model": self._config.model.source, "step": self._step, **result}
        failure = None
        if self._args.against:
            try:
                result["against"] = win_rates(self._run_dir, self._args.against)
            except ConfigError as error:  # the evaluation itself is kept
                failure = error
        code = _show(self._args, self._run_dir, result)
        if failure and not code:
            raise failure
        return code

    def print_failure(self, lines: list[str]) -> None:
        print("\n".join(lines), file=sys.stderr)

    def next_command(self) -> str:
        return "Nothing was measured; start the command again."


def result_lines(result: Mapping[str, Any], *, width: int) -> list[str]:
    """Return a table with a row for each held-out set, and the mean of several.

    Where it is wider than a terminal of `width` characters, each set has a table of its own, with a row for each value.
    """
    sets = result["sets"]
    sizes = sorted({each["k"] for row in sets for each in row["pass_at"]})
    if len(sizes) > _MOST_SIZES:  # evaluation.json has all of them
        sizes = sorted({1, *(each["k"] for row in sets for each in row["pass_at"][-1:])})
    measure = next((row.get("measure", "score") for row in sets), "score")
    more = [key for key in ("loss", "accuracy") if any(row.get(key) is not None for row in sets)]
    header = [
        "set",
        measure,
        *(f"mean {key}" for key in more),
        *(f"pass@{k}" for k in sizes),
        *(f"maj@{k}" for k in sizes if k > 1),
    ]
    rows = [[*header, f"{unit_of(measure)}s", "missing", "tokens per answer", "time"]]
    for row in sets:
        pass_at, majority_at = ({each["k"]: each for each in row[key]} for key in ("pass_at", "majority_at"))
        estimates = [pass_at.get(k) for k in sizes] + [majority_at.get(k) for k in sizes if k > 1]
        rows.append(
            [
                row["name"],
                _with_interval(row, "score", measure),
                *(f"{row[key]:.3f}" for key in more),
                *("-" if each is None else _with_interval(each, "value") for each in estimates),
                str(row["answer_count"]),
                str(row["missing_count"]),
                f"{row['tokens_per_answer']:.0f}",
                f"{row['seconds']:.1f} s",
            ]
        )
    if len(sets) > 1 and result["score"] is not None:
        rows.append(["mean of sets", _with_interval(result, "score", measure), *[""] * (len(rows[0]) - 2)])
    table = align_columns(rows)
    if len(table[0]) > width:
        pairs = [[pair for pair in zip(rows[0], row, strict=True) if pair[1]] for row in rows[1:]]
        parts = [align_columns(part) for part in pairs]
        table = [line for part in parts for line in (*part, "")][:-1]
    lines = ["", *table, "", "[low, high] is the 95 % interval, clustered by task group."] if sets else []
    if against := result.get("against"):
        rows = [["set", "win rate", "prompts"]]
        rows += [[row["name"], _with_interval(row, "win_rate"), str(row["prompts"])] for row in against["sets"]]
        lines += ["", f"Against {against['evaluation']}; equal scores count half:", *align_columns(rows)]
    if result["lm_eval"]:
        rows = _harness_rows(result["lm_eval"])
        lines += ["", "lm-evaluation-harness (+- is the standard error):", *align_columns(rows)]
    return lines


def _with_interval(row: Mapping[str, Any], key: str, measure: str = "score") -> str:
    return format_interval(*of_measure(row[key], row.get("interval") or row.get("half_width"), measure), 3)


def _harness_rows(results: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for each metric of each task; the harness names them "acc,none" and "acc_stderr,none"."""
    rows = [["task", "metric", "value"]]
    for task, values in results.items():
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                error = values.get(f"{metric}_stderr,{kind}")
                rows.append([task, key, format_interval(value, error if isinstance(error, int | float) else None, 3)])
    return rows
