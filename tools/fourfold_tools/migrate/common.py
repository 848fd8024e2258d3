"""Conversions that several systems share: names, models, data, learning rates, steps."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, get_args

from fourfold.config import DataSourceConfig, parse_template
from fourfold.config.schema import SinkName
from fourfold.errors import ConfigError
from fourfold.paths import expand_home
from fourfold.text import choices, clean
from fourfold_tools.migrate.draft import Draft
from fourfold_tools.migrate.flags import Flag, names_of

ASSUMED_ROWS: Final = 10_000
_MOST_COUNTED_BYTES: Final = 4 << 30  # 8 s at the measured 0.5 GiB/s
# Flags of the training data, in each system.
_DATA_FLAGS: Final = ("data.prompt_dataset", "data.dataset", "dataset_name", "data.train_files")
KV_CACHE_GIB: Final = 8
MIN_REFERENCE_TOKENS: Final = 8192
REFERENCE: Final = "if it is another model than the one that training begins with"
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w.-][\w./-]*)?")
_PROCESSES: Final = re.compile(r"--(?:num[_-]processes|nproc[_-]per[_-]node|num_gpus)(?:=|\s+)(\d+)")
_NODES: Final = re.compile(r"--(?:nnodes|num_nodes)(?:=|\s+)(\d+)")
_DATA_FILES: Final = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The user's options in addition to the configuration."""

    source: str
    """Name of the file, for messages."""
    name: str = ""
    """Name of the run; empty: from the configuration."""
    rows: int = 0
    """Rows of the training data; 0: unknown."""
    processes: int = 0
    """Processes of the trainer, where the configuration has no number of them; 0: unknown."""
    trainer: str = ""
    """Name of the trainer that the configuration is for; empty: as the configuration says."""


def run_name(draft: Draft, options: Options, candidates: Sequence[tuple[str, str | None]], fallback: str) -> None:
    """Set `name` to the first usable one of (flag, text)."""
    for flag, text in [("", options.name), *candidates]:
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", PurePosixPath(text or "").name).strip("-")[:64]
        if name:
            draft.set("name", name, *([flag] if flag else []))
            return
    draft.set("name", fallback)


def trainer(
    options: Options, named: str, tables: Mapping[str, Mapping[str, Flag]], names: Sequence[str]
) -> tuple[str, str]:
    """Return the trainer of a configuration, and a point to check if that is a guess.

    It is that of the options (ConfigError: it is unknown), that which the configuration names, or the one whose table
    has most of the configuration's `names`.
    """
    if options.trainer and options.trainer not in tables:
        raise ConfigError(f"--trainer {clean(options.trainer, 80)} is unknown; {choices(options.trainer, tables)}")
    if found := options.trainer or named:
        return found, ""
    counts = {one: len({*names} & {*names_of(table)}) for one, table in tables.items()}
    best = [one for one in tables if counts[one] == max(counts.values())]
    others = ", ".join(best[1:])
    guess = f"it is read as a configuration of {best[0]}; for {others}, import again with --trainer"
    return best[0], guess if others else ""


def ranks(draft: Draft, options: Options, launcher: str, *names: str, given: int = 0, why: str = "") -> None:
    """Set the number of the trainer's processes: of the options, of the configuration, or of the launcher's words."""
    found, nodes = _PROCESSES.search(launcher), _NODES.search(launcher)
    count = options.processes or given
    if not count and found:
        count = int(found[1]) * (int(nodes[1]) if nodes else 1)
    note = "--gpus" if options.processes else "" if given else "processes of the launcher"
    draft.set("trainer.device", "cuda")
    draft.set(
        "trainer.ranks", max(count, 1), *([] if note and count else names),
        note=note if count else "CHECK: not in the configuration",
    )  # fmt: skip
    if not count:
        draft.check(
            f"trainer.ranks = 1: the configuration does not have the number of processes{why}. Import again with "
            f"--gpus N"
        )


def model(draft: Draft, key: str, source: str | None, *names: str, note: str = "") -> None:
    """Set a model: a folder, or one of the hub."""
    if not source:
        draft.check(f"{key}: the configuration names no model; write its folder")
    draft.set(key, _location(draft, key, source) if source else "MODEL_FOLDER", *names, note=note)


def reference(draft: Draft, source: str | None, name: str, policy: str) -> None:
    """Set the reference of rows, if it is another model than that of the flag `policy`."""
    if source and source != draft.flags[policy]:
        model(draft, "reference.source", source, name)
        draft.set("reference.device", "cuda")
        context = draft.lines["model",]["max_context_tokens"].value
        draft.set("reference.tokens_per_batch", max(context, MIN_REFERENCE_TOKENS))
    else:
        draft.leave("not needed: the reference is the model that training begins with", name)


def is_hub_name(source: str) -> bool:
    """Return whether a model or data set is probably one of the hub, by its form."""
    return not source.endswith(_DATA_FILES) and _HUB_NAME.fullmatch(source) is not None


def _location(draft: Draft, key: str, source: str) -> str:
    """Return a path unchanged, and a name of the hub in Fourfold's form."""
    if not is_hub_name(source):
        return source
    draft.check(f"{key}: hf:{source} is downloaded from the Hugging Face Hub; write {source} if that is a folder")
    return f"hf:{source}"


def sources(draft: Draft, key: str, found: Sequence[Mapping[str, tuple[Any, str]]]) -> None:
    """Set the sources of `data.train` or `data.eval`, each with its keys: a value, and the flag that it comes from."""
    if not found:
        path = f"{key.removeprefix('data.').upper()}.jsonl"
        draft.check(f"{key}.path: the configuration names no data; write a JSONL, CSV or Parquet file for {path}")
        draft.set(f"{key}.path", path)
    names, used, titles = {flag for keys in found for _, flag in keys.values()}, set[str](), set[str]()
    for number, keys in enumerate(found):
        table = key if len(found) == 1 else f"{key}.{number}"
        path = _location(draft, f"{table}.path", str(keys["path"][0]))
        if (title := DataSourceConfig(path=path).default_name) in titles:
            title = f"{title[:60]}-{number}"
            draft.set(f"{table}.name", title, note="the name of the file is that of another source, too")
        titles.add(title)
        for part, (value, flag) in keys.items():
            if value is not None and (part not in ("split", "config") or path.startswith("hf:")):
                draft.set(f"{table}.{part}", path if part == "path" else value, flag)
                used.add(flag)
    draft.leave("not needed: a file has no splits, and a single source no weight", *(names - used))


def weights(draft: Draft, text: str, count: int) -> list[float | None]:
    """Return the weights "0.5,0.5" of several sources; None for each if there are none."""
    none: list[float | None] = [None] * count
    if not text or count < 2:
        return none
    try:
        found = [float(share) for share in text.split(",")]
    except ValueError:
        found = []
    if len(found) == count and min(found) > 0:
        return list(found)
    draft.check(f"data.train: the weights {text!r} are not {count} positive numbers; write `weight` of each source")
    return none


def template(draft: Draft, text: str, column: str) -> str | None:
    """Return a template of OpenRLHF, whose `{}` is the prompt, with the name of the column; None if there is none."""
    before, braces, after = text.partition("{}")
    found = f"{before}{{{column}}}{after}"
    try:
        if not braces:
            raise ValueError("it has no {}")
        parse_template(found)
    except ValueError as error:
        draft.check(
            f"data.train.template: the template {text!r} is not converted ({error}); write it with {{{column}}}"
        )
        return None
    return found


def steps(
    draft: Draft, options: Options, *, limit: int, passes: float, prompts: int, names: Sequence[str], fixed: int = 0
) -> int:
    """Set `steps` and return it.

    Args:
        draft: gets the line.
        options: may have the number of rows.
        limit: most rows that are used; 0: unknown.
        passes: passes over the rows.
        prompts: prompts or rows of one step.
        names: flags of the calculation.
        fixed: number of steps that the configuration has; 0: none.
    """
    if fixed:
        draft.set("steps", fixed, *names)
        return fixed
    count, text, unknown = _count_steps(draft, options, limit, passes, prompts)
    draft.set("steps", count, *names, note=f"CHECK: {text}" if unknown else text)
    if unknown:
        draft.check(f"steps = {count}: {unknown}, or correct steps, and warmup_steps where it is not 0")
    return count


def row_steps(
    draft: Draft, options: Options, *, limit: int, passes: float, names: Sequence[str], counted: bool, fixed: int = 0
) -> int:
    """Set `data.passes` of a run of rows; `steps` if it is fixed, or sources have weights, so that passes have no end.

    Args:
        draft, options, limit, passes, names, fixed: as those of `steps`.
        counted: whether the number of steps is needed, because a flag is a share of it.

    Returns:
        The number of steps; 0 if it is not needed.
    """
    rows = draft.lines["batch",]["rows_per_step"].value
    if fixed or any("weight" in lines for table, lines in draft.lines.items() if table[:2] == ("data", "train")):
        return steps(draft, options, limit=limit, passes=passes, prompts=rows, names=names, fixed=fixed)
    draft.set("data.passes", float(passes), *names)
    if not counted:
        return 0
    count, text, unknown = _count_steps(draft, options, limit, passes, rows)
    if unknown:
        draft.check(
            f"trainer.warmup_steps and other shares of the steps are for {count} steps ({text}): {unknown}, or correct "
            f"them"
        )
    return count


def _count_steps(draft: Draft, options: Options, limit: int, passes: float, prompts: int) -> tuple[int, str, str]:
    """Return the steps, how they were calculated, and a sentence if the number of rows is unknown."""
    known_rows = options.rows or _count_rows(draft)
    rows = min(known_rows, limit) if known_rows and limit else known_rows or limit or ASSUMED_ROWS
    unit = "rows" if "rows_per_step" in draft.lines["batch",] else "prompts"
    text = f"{rows:,} rows x {passes:g} / {prompts:,} {unit}"
    known = f"at most {limit:,} are used" if limit else f"{ASSUMED_ROWS:,} are assumed"
    unknown = f"the configuration does not have the number of rows of the data; {known}. Import again with --rows N"
    return max(int(rows * passes / prompts), 1), text, "" if known_rows else unknown


def _count_rows(draft: Draft) -> int:
    """Return the rows of the training data, if it is one JSONL file on this machine; else 0."""
    value = next((draft.flags[name] for name in _DATA_FLAGS if name in draft.flags.table), None)
    names = value.split(",") if isinstance(value, str) else list(value or ())
    try:
        path = expand_home(names[0].strip(), "data") if len(names) == 1 else Path()
        if path.suffix != ".jsonl" or not path.is_file() or path.stat().st_size > _MOST_COUNTED_BYTES:
            return 0
        with path.open("rb") as lines:
            return sum(not line.isspace() for line in lines)
    except (ConfigError, OSError, ValueError):
        return 0


def schedule(
    draft: Draft,
    table: str,
    kind: str,
    names: Sequence[str],
    *,
    warmup: int,
    warmup_names: Sequence[str],
    final: float = 0.0,
    final_names: Sequence[str] = (),
) -> None:
    """Set schedule, warm-up and final share of `table` for a scheduler of transformers."""
    kinds = {
        "constant": "constant",
        "constant_with_warmup": "constant",
        "linear": "linear",
        "cosine": "cosine",
        "cosine_with_min_lr": "cosine",
    }
    found = kinds.get(kind)
    if found is None:
        found = "cosine"
        draft.check(f"{table}.schedule: {kind} has no equivalent; cosine is used, or choose constant or linear")
    draft.set(f"{table}.schedule", found, *names)
    draft.set(f"{table}.warmup_steps", 0 if kind == "constant" else warmup, *warmup_names)
    draft.set(f"{table}.final_learning_rate_share", final if found != "constant" else 0.0, *final_names)


def warmup_steps(share: float, count: int) -> int:
    """Return the warm-up of `count` steps for a share of them."""
    return math.ceil(share * count - 1e-9)


def gradient_limit(draft: Draft, key: str, limit: float, name: str) -> None:
    """Set a clip of gradients; 0 is none."""
    draft.set(key, limit or 1e9, name, note="" if limit else "no clipping")


def mini_batches(draft: Draft, samples: int, per_update: int, *names: str) -> None:
    """Set the optimizer steps of one pass over a batch."""
    count = max(samples // per_update, 1)
    draft.set("batch.mini_batches_per_step", count, *names, note=f"{samples:,} samples / {per_update:,}")
    if samples % per_update:
        size = -(-samples // count)
        draft.check(
            f"batch.mini_batches_per_step = {count}: {per_update:,} samples per optimizer step do not divide the "
            f"{samples:,} of a step; here each has {size:,}"
        )


def tokens(draft: Draft, key: str, wanted: int, least: int, *names: str) -> None:
    """Set a limit of tokens that has to hold one sample."""
    note = "" if wanted >= least else f"raised from {wanted:,}: one sample may have {least:,} tokens"
    draft.set(key, max(wanted, least), *names, note=note)


def colocated(draft: Draft, name: str) -> None:
    """Set the KV cache of engines that share GPUs, which they cannot measure."""
    draft.set("rollout.kv_cache_gib", KV_CACHE_GIB, name, note="CHECK: it is asked for, not measured")
    draft.check(
        f"rollout.kv_cache_gib = {KV_CACHE_GIB}: services that share GPUs ask for memory instead of measuring a share; "
        f"`fourfold plan` prints what is left on a GPU, so raise it to that"
    )


def require(value: int | None, title: str, low: int = 1) -> int:
    """Return a positive number of the configuration, or raise ConfigError."""
    if value is None or value < low:
        raise ConfigError(f"{title} = {value} must be at least {low}; correct it in the file")
    return value


def trackers(draft: Draft, sinks: Mapping[str, str], settings: Mapping[str, str]) -> None:
    """Set [logging], if a flag asks for a tracker.

    Args:
        sinks: the flag that asks for each tracker, by its name in the recipe.
        settings: the flag of each key.
    """
    flags = draft.flags
    if not sinks:
        draft.leave("not needed without a tracker", *settings.values())
        return
    draft.set("logging.sinks", sorted(sinks), *dict.fromkeys(sinks[sink] for sink in sorted(sinks)))
    for key, flag in settings.items():
        if key == "logging.tensorboard_dir" and "tensorboard" not in sinks:
            draft.leave("not needed without tensorboard", flag)
        elif flags[flag]:
            draft.set(key, flags[flag], flag)
        else:
            draft.leave("not needed: it is empty", flag)


def listed_trackers(draft: Draft, flag: str, none: Sequence[str]) -> dict[str, str]:
    """Return `flag` for each tracker of Fourfold that its list has; `none` are names in it that are no trackers."""
    names = [name for name in draft.flags[flag] if name not in none]
    found = {name: flag for name in names if name in get_args(SinkName)}
    if others := [name for name in names if name not in found]:
        draft.check(
            f"logging.sinks: {draft.flags.title(flag)} has {', '.join(others)}, and the trackers are "
            f"{', '.join(get_args(SinkName))}; choose among them"
        )
    if not found:
        draft.leave("no equivalent of these trackers" if others else "not needed: no tracker", flag)
    return found
