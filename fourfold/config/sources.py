"""Defines the sources of prompts: where rows come from, which columns make a prompt, and the shares of a mixture."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, Self

from pydantic import Field, field_validator, model_validator

from fourfold.config.table import EvalTemperature
from fourfold.table import Table

MIXTURE_BLOCK: Final = 1024
"""Positions of the training order in which each weighted source has its exact share."""
_NAME: Final = r"^[A-Za-z0-9_-]{0,64}$"
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9_-]+")


class DataSourceConfig(Table):
    """A source of prompts: a file, a folder or a data set of the Hugging Face Hub (`path`), or a generator."""

    path: str = ""
    """JSONL, JSON, CSV, TSV or Parquet file; dataset folder (`save_to_disk`, or a copy of a repository of the hub); or
    `hf:OWNER/NAME`, a data set of the hub, with `@REVISION` if it is not the newest."""
    split: str = ""
    """Split of a dataset folder or of a data set of the hub. Empty: the only one."""
    config: str = ""
    """Configuration (subset) of a data set of the hub. Empty: its default, or the only one."""
    prompt_field: str = ""
    """Column with the prompt. Empty: that of [data]."""
    answer_field: str = ""
    """Column with the reference answer, or COLUMN.KEY. Empty: that of [data]."""
    template: str = ""
    """Text that makes the prompt from columns, as "Context: {context}\\nQuestion: {question}". It takes the place of
    `prompt_field`. A brace of the text is written twice."""
    reasoning_gym: str = ""
    """Name of a task of reasoning-gym."""
    options: dict[str, Any] = Field(default={})
    """Options of the task `reasoning_gym`."""
    size: int = Field(default=0, ge=0)
    """Rows to take. 0: all rows of a file; a generator needs a size."""
    seed: int = Field(default=0, ge=0)
    """Seed of the generator of `reasoning_gym`."""
    skip: str = ""
    """Regular expression: rows whose prompt has a match are left out, as those with a trivial question. Empty: none."""

    @property
    def default_name(self) -> str:
        """Name of the file, folder, data set or task, of letters, digits, `_` and `-`; without the revision."""
        on_hub = self.path.startswith("hf:")
        path = PurePosixPath(self.path.partition("@")[0] if on_hub else self.path)
        base = self.reasoning_gym or (path.name if on_hub else path.stem)
        return _NO_NAME.sub("-", base).strip("-")[:64] or "data"

    @field_validator("template")
    @classmethod
    def _columns_only(cls, value: str) -> str:
        parse_template(value)
        return value

    @field_validator("skip")
    @classmethod
    def _is_pattern(cls, value: str) -> str:
        try:
            re.compile(value)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"skip = {value!r:.200} is no regular expression: {error}") from None
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path and self.reasoning_gym:
            raise ValueError(
                f"path = {self.path!r} and reasoning_gym = {self.reasoning_gym!r} are two sources; remove one"
            )
        if not self.path and not self.reasoning_gym:
            raise ValueError(
                "path and reasoning_gym are empty, and rows need a source; set path to a file or folder, or "
                'reasoning_gym to a task such as "products"'
            )
        if self.reasoning_gym and not self.size:
            raise ValueError(
                f"reasoning_gym = {self.reasoning_gym!r} generates any number of rows; set size, such as size = 4096"
            )
        if self.options and not self.reasoning_gym:
            raise ValueError(
                f"options = {self.options} are for a reasoning-gym task, and path = {self.path!r} is none; remove them"
            )
        if self.reasoning_gym and (part := self.split or self.config):
            raise ValueError(
                f"split and config choose a part of a data set, and reasoning_gym = {self.reasoning_gym!r} has no "
                f"{part!r}; remove them"
            )
        if self.template and self.prompt_field:
            raise ValueError(
                f"template makes the prompt from columns, and prompt_field = {self.prompt_field!r} is another prompt; "
                f"remove one"
            )
        return self


class TrainSourceConfig(DataSourceConfig):
    """A source of training prompts: one table [data.train], or several [[data.train]]."""

    name: str = Field(default="", pattern=_NAME)
    """Name of the source in metrics, in samples.jsonl and in the metadata field `data_source`. Empty: with several
    sources, that of the file, of the data set or of the task."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the drawn prompts, relative to the other sources; with a weight, every source needs one. Unset: the
    rows of all sources form one pool."""

    @property
    def title(self) -> str:
        """Name of the source, also without `name`."""
        return self.name or self.default_name


class EvalSourceConfig(DataSourceConfig):
    """A held-out set: a source of prompts, and how its answers are sampled; a key that is absent is the run's."""

    name: str = Field(default="", pattern=_NAME)
    """Name of the set, different from that of every other set. Empty: that of the file, of the data set or of the
    task."""
    samples_per_prompt: int | None = Field(default=None, ge=1, le=256)
    """Answers to each prompt. Absent: `evaluation.samples_per_prompt`."""
    max_prompts: int | None = Field(default=None, ge=0)
    """Maximum number of prompts; 0: all. Absent: `evaluation.max_prompts`."""
    temperature: EvalTemperature | None = None
    """Temperature of the answers; 0: greedy decoding. Absent: `sampling.temperature`."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of an answer. Absent: `sampling.max_new_tokens`."""

    @property
    def title(self) -> str:
        """Name of the set, also without `name`."""
        return self.name or self.default_name


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """A held-out set with every value filled in."""

    name: str
    source: EvalSourceConfig | None  # None: the groups that `data.holdout` takes out of the training data
    samples_per_prompt: int
    max_prompts: int  # 0: all
    temperature: float  # 0: greedy decoding
    max_new_tokens: int


def check_sources(sources: Sequence[TrainSourceConfig]) -> None:
    """Check what involves several sources; ValueError has value, rule and fix of the first mistake."""
    titles = [source.title for source in sources]
    if twice := next((title for title in titles if titles.count(title) > 1), ""):
        raise ValueError(f"two sources have the name {twice!r}; give each a `name` of its own")
    weights = [source.weight for source in sources if source.weight is not None]
    if weights and len(weights) < len(sources):
        missing = next(source.title for source in sources if source.weight is None)
        raise ValueError(
            f"`weight` is set for {len(weights)} of {len(sources)} sources, and not for {missing!r}; give every source "
            f"a weight, or none"
        )
    for source, count in zip(sources, block_counts(weights), strict=False):
        if not count:
            share = (source.weight or 0.0) / sum(weights)
            raise ValueError(
                f"weight = {source.weight:g} of {source.title!r} is {share:.2g} of all, and shares are multiples of "
                f"1/{MIXTURE_BLOCK}; raise it, or remove the source"
            )


def block_counts(weights: Sequence[float]) -> list[int]:
    """Return the positions of each source in a block of MIXTURE_BLOCK, by the method of the largest remainder."""
    if not weights:
        return []
    exact = [weight / sum(weights) * MIXTURE_BLOCK for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for index in by_remainder[: MIXTURE_BLOCK - sum(counts)]:
        counts[index] += 1
    return counts


def parse_template(template: str) -> list[tuple[str, str]]:
    """Return a template as pairs of a text and the column after it; the column of the last pair may be empty.

    A placeholder is a plain name of a column: no attribute, index, conversion or format, so that a template computes
    nothing.

    Raises:
        ValueError: a brace has no partner, or a placeholder is no plain name.
    """
    parts: list[tuple[str, str]] = []
    try:
        for text, column, form, conversion in string.Formatter().parse(template):
            if column is not None and (not column or form or conversion or set(column) & set(".[]{}!:")):
                raise ValueError(f"a placeholder is {{COLUMN}}, and {column!r} is no plain name of a column")
            parts.append((text, column or ""))
    except ValueError as error:
        raise ValueError(
            f"template = {template!r}: {error}; write {{COLUMN}}, and {{{{ and }}}} for braces of the text"
        ) from None
    if template and not any(column for _, column in parts):
        raise ValueError(
            f"template = {template!r} has no placeholder {{COLUMN}}, so that all prompts are equal; add one"
        )
    return parts
