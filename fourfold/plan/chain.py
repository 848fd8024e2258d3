"""Checks recipes that run in order in one command: a later one may begin with the run of an earlier one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.host.disk import free_gib
from fourfold.model import folder as model_folder
from fourfold.model import runs
from fourfold.model.tokenizer import tokenizer_sha256
from fourfold.plan.batch import batch_plan
from fourfold.plan.memory import GIB, checkpoint_bytes, weight_bytes
from fourfold.plan.models import model_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A recipe of a chain."""

    file: Path
    config: Config


def load_chain(files: Sequence[Path], assignments: Sequence[str]) -> list[Link]:
    """Read recipes that run in this order, each with the same keys of the command line, and check how they depend.

    Raises:
        ConfigError: a recipe is wrong, two have one name, or one needs a run that a later one makes.
    """
    links = list[Link]()
    for file in files:
        try:
            links.append(Link(file=file, config=configuration.load(file, assignments)))
        except ConfigError as error:
            if not assignments or len(files) == 1:
                raise
            text = f"{error.message}. --set is for each of the {len(files)} recipes, and this is an error of {file}"
            raise ConfigError(text) from None
    if len(links) > 1:
        check_order(links)
    return links


def check_order(links: Sequence[Link]) -> None:
    """Check the names of recipes, and that those that make a run come before those that begin with it."""
    names = [link.config.name for link in links]
    for position, link in enumerate(links):
        name = link.config.name
        if (first := names.index(name)) < position:
            raise ConfigError(f'{link.file}: name = "{name}" is that of {links[first].file}, too; set another name')
        for key, source in run_sources(link.config).items():
            needed, what = runs.parse(source, key)[0], f"{link.file}: {key} = {source!r}"
            if needed not in names:
                continue
            if (made := names.index(needed)) >= position:
                after = "this recipe makes it itself" if made == position else f"{links[made].file} makes it later"
                raise ConfigError(f"{what}: {after}; name the recipe that makes it before this one")
            scores = links[made].config.algorithm.loss.trains == "scores"
            if key in ("model.source", "reference.source") and scores:
                raise ConfigError(f"{what}: {links[made].file} makes a reward model; name a run of a language model")
            if key.startswith("reward.") and not scores:
                raise ConfigError(f"{what}: {links[made].file} makes a language model; name a run of a reward model")
            if key.startswith("reward."):
                kind = "process" if links[made].config.algorithm.loss.reads == "steps" else "score"
                models = (table.model for table in link.config.reward if table.model is not None)
                if any(model.source == source and model.kind != kind for model in models):
                    of_kind = "a process reward model" if kind == "process" else "a reward model of whole texts"
                    raise ConfigError(f'{what}: {links[made].file} makes {of_kind}; set kind = "{kind}" beside it')


def run_sources(config: Config) -> dict[str, str]:
    """Return the sources `run:NAME` of a recipe by dotted key, such as `reward.NAME.model.source`."""
    values = configuration.flatten(config.model_dump())
    return {
        key: value
        for key, value in values.items()
        if key.endswith(".source") and isinstance(value, str) and value.startswith(runs.PREFIX)
    }


def expected_run(config: Config) -> runs.ExpectedRun:
    """Return the run of a recipe that was checked, for the checks of later recipes."""
    return runs.ExpectedRun(
        source=runs.begins_with(config.model.source, "model.source"),
        steps=config.steps,
        export_every_steps=config.checkpoint.export_every_steps,
        chat_template=config.data.chat_template or runs.expected_template(config.model.source, "model.source"),
    )


@contextmanager
def named(file: Path) -> Iterator[None]:
    """Begin the messages of errors with the recipe, unless they do so already."""
    try:
        yield
    except ConfigError as error:
        if str(file) in error.message:
            raise
        raise ConfigError(f"{file}: {error.message}") from None


def check_run_sources(config: Config) -> list[str]:
    """Compare the models of earlier runs with the model that a recipe trains; return warnings.

    Raises:
        ConfigError: a source does not exist, or a critic from an earlier run has another tokenizer.
    """
    warnings = []
    for key, source in run_sources(config).items():
        folder, policy = model_folder.resolve(source, key=key), model_folder.resolve(config.model.source)
        if key == "critic.source" and _vocabulary(folder) != _vocabulary(policy):
            raise ConfigError(
                f"{key} = {source!r} has another tokenizer.json than model.source = {config.model.source!r}, whose "
                f"tokens it would read; begin with a model of the same tokenizer"
            )
        if key.startswith("reward.") and tokenizer_sha256(folder) != tokenizer_sha256(policy):
            warnings.append(
                f"{key} = {source!r} has another tokenizer or chat template than model.source = "
                f"{config.model.source!r}: it encodes the texts of this run in its own way"
            )
    return warnings


def _vocabulary(folder: Path) -> bytes:
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest()


def disk_bytes(config: Config) -> int:
    """Return about how much disk the checkpoints and exports of a run take at most."""
    sizes, kept = model_sizes(config), config.checkpoint
    # The oldest checkpoint is deleted after the newest is written.
    checkpoints = min(len(batch_plan(config).checkpoints), kept.keep + kept.keep_best + 1)
    exports = 1 + bool(config.trainer.ema_decay) + config.algorithm.needs_critic
    if kept.export_every_steps:
        exports += (config.steps - 1) // kept.export_every_steps
    return checkpoints * checkpoint_bytes(config, sizes) + exports * weight_bytes(config, sizes.policy)


def describe_chain(links: Sequence[Link]) -> str:
    """Return the order of the runs and, if the sizes of all models are known, the disk that they take."""
    order, free = " -> ".join(link.config.name for link in links), free_gib(Path.cwd())
    try:
        needed = sum(disk_bytes(link.config) for link in links) / GIB
    except ConfigError:  # a trainer may know a model whose config.json a plan cannot read
        return f"{order}: {free:.1f} GiB of disk free."
    advice = "" if needed < free else ": too little; lower checkpoint.keep, or free some space"
    return f"{order}: about {needed:.1f} GiB of disk for all, {free:.1f} GiB free{advice}."
