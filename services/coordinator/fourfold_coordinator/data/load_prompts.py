"""Turns the rows of data sets into tokenized prompts.

rows --template, tokens--> prompts --holdout--> training prompts (endless, shuffled by seed)
                                           \\--> evaluation prompts (each once)
"""

from __future__ import annotations

import json
import logging
import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from fourfold.answers import ANSWER_VALUE, answer_text
from fourfold.config.schema import Config, DataConfig, HoldoutConfig
from fourfold.config.sources import DataSourceConfig, parse_template
from fourfold.errors import ConfigError, InvalidInput
from fourfold.model.chat import argument_value, read_messages, read_tools
from fourfold.seeds import derive_seed
from fourfold.text import choices, clean

from .prompts import HeldOutSet, Prompt, PromptSet
from .sources import Row, describe, read_rows

log = logging.getLogger("fourfold.coordinator")

_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")
_MAX_METADATA_BYTES: Final = 64 << 10
_DEFAULT_TOOLS: Final = DataConfig().tools_field
SOURCE_FIELD: Final = "data_source"
"""Metadata field with the name of the source of a training prompt. A column of this name stays as it is."""


class PromptTokenizer(Protocol):
    """The methods of `fourfold.model.tokenizer.Tokenizer` that are used here."""

    def render_chat(
        self, messages: Sequence[dict[str, Any]], /, *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str: ...

    def escape(self, value: Any, /) -> Any: ...

    def unescape(self, text: str, /) -> str: ...

    def encode(self, text: str, /, *, add_special: bool = False) -> list[int]: ...


def load_prompts(config: Config, tokenizer: PromptTokenizer, *, train: bool = True) -> PromptSet:
    """Read, tokenize and split the data of a recipe. Takes seconds: call it in a thread.

    With `train = False`, training data is read only to take the holdout out of it, and is left out of the result.
    """
    data = config.data
    trained: list[Prompt] = []
    left_out = 0
    most = data.max_prompt_tokens or config.model.max_context_tokens
    for source in data.train if train or data.holdout is not None else ():
        loader = _Loader(config, tokenizer, source, name=source.title if data.names_sources else "", max_tokens=most)
        trained += loader.load(first=trained[-1].index + 1 if trained else 0)
        left_out += len(loader.dropped[loader.too_long])
    taken: list[Prompt] = []
    if data.holdout is not None:
        trained, taken = split_holdout(trained, data.holdout, seed=config.seed)
        if not trained:
            raise ConfigError("the holdout leaves no training prompt; add data, or lower data.holdout.groups")
    # The groups of data.holdout are those of the training data: each row of another set is a group of its own.
    without_groups = config.model_copy(update={"data": data.model_copy(update={"holdout": None})})
    held_out = []
    for rule in config.eval_sets:
        name = rule.name if data.names_sources else ""
        prompts = taken if rule.source is None else _Loader(without_groups, tokenizer, rule.source, name=name).load()
        held_out.append(HeldOutSet(rule=rule, prompts=tuple(prompts[: rule.max_prompts or None])))
    overlaps = find_overlaps(trained, held_out) if train and data.eval else []
    if overlaps and data.eval_overlap == "error":
        raise ConfigError(f'{overlaps[0]}, or set data.eval_overlap = "warn"')
    weights = {source.title: source.weight for source in data.train if source.weight is not None}
    return PromptSet(
        train=trained if train else (),
        held_out=held_out,
        seed=config.seed,
        weights=weights if len(weights) > 1 else {},
        shuffled=data.order == "shuffled",
        left_out=left_out,
        warnings=overlaps,
    )


def split_holdout(prompts: Sequence[Prompt], holdout: HoldoutConfig, *, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return the training prompts, and one of each distinct prompt of the held-out groups.

    The seed draws the groups. If most groups have the same number of distinct prompts, only those groups are drawn, so
    that each has the same weight in a mean score. Example: among products of two digits, 3 * 7 and 7 * 3 are one group
    of two prompts. Squares are groups of one prompt, so they all stay in the training data.
    """
    distinct: dict[str, dict[str, Prompt]] = {}
    for prompt in prompts:
        distinct.setdefault(prompt.group_key, {}).setdefault(prompt.text, prompt)
    if len(distinct) <= holdout.groups:
        raise ConfigError(
            f"data.holdout.groups = {holdout.groups}, but the data has {len(distinct)} groups by "
            f"{repr(holdout.field) if holdout.field else 'its prompts'}; hold fewer out, or give more data"
        )
    size, frequency = Counter(len(group) for group in distinct.values()).most_common(1)[0]
    keys = sorted(distinct)
    if frequency > len(keys) / 2 and frequency >= holdout.groups:
        keys = [key for key in keys if len(distinct[key]) == size]
    drawn = set(random.Random(derive_seed(seed, "holdout")).sample(keys, holdout.groups))
    train = [prompt for prompt in prompts if prompt.group_key not in drawn]
    held_out = [prompt for key in sorted(drawn) for prompt in sorted(distinct[key].values(), key=lambda p: p.text)]
    return train, held_out


@dataclass(slots=True)
class _Loader:
    """Reads and tokenizes the rows of one source."""

    config: Config
    tokenizer: PromptTokenizer
    source: DataSourceConfig
    name: str = ""  # of the source, for the metadata of its prompts
    max_tokens: int | None = None  # of a prompt, besides the limit of the context
    dropped: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # row numbers, by the rule
    unused: Counter[str] = field(default_factory=Counter)  # rows from which a column was left out, by the column
    too_long: str = field(init=False)  # a key of `dropped`: rows with more than `max_tokens`
    skipped: str = field(init=False)  # another one: rows whose prompt `skip` matches
    used_columns: frozenset[str] | None = field(init=False)  # that scorers, agents or the recipe read; None: any

    def __post_init__(self) -> None:
        self.too_long = f"have more than data.max_prompt_tokens = {self.config.data.max_prompt_tokens} tokens"
        self.skipped = f"match skip = {self.source.skip!r}"
        self.used_columns = _used_columns(self.config)

    def load(self, *, first: int = 0) -> list[Prompt]:
        """Return the prompts; `first` is the index of the first row."""
        where = describe(self.source)
        prompts: list[Prompt] = []
        count = 0
        for row_number, row in enumerate(read_rows(self.source)):
            count += 1
            try:
                made = self._make_prompt(first + row_number, row, f"{where}, row {row_number}")
            except RecursionError:
                raise ConfigError(f"{where}, row {row_number}: is nested too deeply; flatten its columns") from None
            if isinstance(made, Prompt):
                prompts.append(made)
            else:
                self.dropped[made].append(row_number)
        for rule, rows in self.dropped.items():
            if rule != self.skipped:
                log.warning(
                    "%s: dropped %d of %d prompts that %s; rows %s", where, len(rows), count, rule,
                    ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else ""),
                )  # fmt: skip
        if self.unused:
            log.warning(
                "%s: left out columns that no scorer reads, of rows with more than %d bytes of metadata: %s; "
                "data.columns chooses", where, _MAX_METADATA_BYTES,
                ", ".join(f"{clean(column, 80)} ({rows} rows)" for column, rows in self.unused.items()),
            )  # fmt: skip
        if not prompts:
            why = ", and ".join(
                f"{'all' if len(rows) == count else f'{len(rows)} of'} {count} {rule}"
                for rule, rows in self.dropped.items()
            )
            raise ConfigError(f"{where}: no prompt is left: {why or 'it is empty'}")
        return prompts

    def _make_prompt(self, index: int, row: Row, where: str) -> Prompt | str:
        """Return the prompt of a row, or why it is left out."""
        data, source = self.config.data, self.source
        raw = read_prompt(row, source, data, where)
        if source.skip and re.search(source.skip, answer_text(raw.value)):
            return self.skipped
        answer, max_context = raw.answer, self.config.model.max_context_tokens
        text, ids = tokenize(raw, data, self.tokenizer, where)
        if not ids:
            raise ConfigError(f"{where}: an empty prompt; remove the row")
        prompt_field = "" if source.template else source.prompt_field or data.prompt_column
        rest = _without_answer(row, source.answer_field or data.answer_column)
        metadata = {k: v for k, v in rest.items() if k not in (prompt_field, "metadata")}
        nested = rest.get("metadata")
        if isinstance(nested, dict):
            metadata |= nested
        elif nested is not None:
            metadata["metadata"] = nested
        if self.name:
            metadata.setdefault(SOURCE_FIELD, self.name)
        if not isinstance(answer, str) and (answer := json.loads(_to_json(answer))) is not None:
            if ANSWER_VALUE in metadata:
                raise ConfigError(
                    f"{where}: the column {ANSWER_VALUE!r} has the name under which a scorer gets the reference answer "
                    f"{answer!r:.100}, which is no text; rename the column"
                )
            metadata[ANSWER_VALUE] = answer
        group_key = _group_key(index, text, metadata, data.holdout, where)
        if (metadata_json := self._encode_metadata(metadata, where)) is None:
            return f"have more than {_MAX_METADATA_BYTES} bytes of metadata that is used"
        if len(ids) >= max_context:
            return f"leave no room in model.max_context_tokens = {max_context}"
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            return self.too_long
        return Prompt(
            index=index,
            text=text,
            token_ids=np.asarray(ids, np.int32),
            answer=answer_text(answer),
            metadata_json=metadata_json,
            messages_json=json.dumps(raw.messages, ensure_ascii=False) if raw.messages else "",
            group_key=group_key,
            source=self.name,
        )

    def _encode_metadata(self, metadata: dict[str, Any], where: str) -> str | None:
        """Return metadata as JSON, without unused columns if it is too large; None if it still is too large."""
        used = self.used_columns
        kept = {column: value for column, value in metadata.items() if used is None or column in used}
        if self.config.data.columns:
            metadata = kept
        encoded = _to_json(metadata)
        if (size := len(encoded.encode())) <= _MAX_METADATA_BYTES:
            return encoded
        if used is None:
            largest = max(metadata, key=lambda column: len(_to_json(metadata[column])))
            raise ConfigError(
                f"{where}: {size} bytes of metadata, most of them in {clean(largest, 80)!r}; the limit is "
                f"{_MAX_METADATA_BYTES}; set data.columns to the columns that scorers and agents read"
            )
        self.unused.update(column for column in metadata if column not in kept)
        encoded = _to_json(kept)
        return encoded if len(encoded.encode()) <= _MAX_METADATA_BYTES else None


def _used_columns(config: Config) -> frozenset[str] | None:
    """Return the columns that scorers, agents or the recipe read; None: a scorer or an agent may read any."""
    data, by_scorers = config.data, [table.columns for table in config.reward]
    named = {*data.columns, data.scorers_field, data.holdout.field if data.holdout else "", SOURCE_FIELD, ANSWER_VALUE}
    named = named.union(*(table.where for table in config.reward))
    if not data.columns and (config.agents.source != "none" or None in by_scorers):
        return None
    return frozenset(named.union(*(columns for columns in by_scorers if columns)))


def _to_json(value: Any) -> str:
    # Generators give tuples and dates, which JSON turns into lists and texts.
    encoded = json.dumps(value, ensure_ascii=False, default=str)
    if "NaN" in encoded or "Infinity" in encoded:  # of Python alone: a reward in another language reads JSON
        encoded = json.dumps(json.loads(encoded, parse_constant=lambda _: None), ensure_ascii=False)
    return encoded


class RawPrompt(NamedTuple):
    """What a row asks, before the chat template."""

    value: Any
    """As the row has it, or as the template of the source writes it."""
    messages: list[dict[str, Any]] | None
    """None: the prompt is a plain text."""
    tools: list[dict[str, Any]]
    answer: Any
    """Reference answer as the row has it; None if there is none."""


def read_prompt(row: Row, source: DataSourceConfig, data: DataConfig, where: str) -> RawPrompt:
    """Return the prompt of a row. Raises ConfigError: a column is missing, or a message or a tool is malformed."""
    value = (
        fill_template(source.template, row, where)
        if source.template
        else _prompt_of(row, source.prompt_field or data.prompt_column, where)
    )
    answer = answer_of(row, source.answer_field or data.answer_column, where)
    if not data.chat:
        return RawPrompt(value, None, [], answer)
    messages = _chat_messages(value, data, where)
    system = row.get("system")  # a column of ShareGPT
    if system and isinstance(value, list) and "from" in value[0] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": str(system)})
    if messages[-1]["role"] == "assistant":
        said = _take_answer(messages, data, where)
        answer = said if answer is None else answer
    tools = argument_value(row.get(data.tools_field))
    if data.tools_field == _DEFAULT_TOOLS and not isinstance(tools, list):
        tools = None  # a column of that name with something else, which is metadata alone
    try:
        return RawPrompt(value, messages, read_tools(tools), answer)
    except InvalidInput as error:
        raise ConfigError(
            f"{where}: data.tools_field = {data.tools_field!r}: {error.message}; correct the row, or set another "
            f'column, or "" if the data have no tools'
        ) from None


def _prompt_of(row: Row, column: str, where: str) -> Any:
    if column not in row:
        raise ConfigError(
            f"{where}: no column {column!r}; it has {', '.join(sorted(row))}; set data.prompt_field, or prompt_field "
            f"of the source"
        )
    return row[column]


def answer_of(row: Row, path: str, where: str) -> Any:
    """Return the reference answer of a row; None if it has none.

    Args:
        row: columns of the data.
        path: name of a column, which may be missing; or COLUMN.KEY, for a key of an object in a column.
        where: source and number of the row, for messages.

    Raises:
        ConfigError: a part of COLUMN.KEY is missing.
    """
    if path in row or "." not in path:
        return row.get(path)
    value: Any = row
    for number, part in enumerate(parts := path.split(".")):
        if value is None:
            return None
        if not isinstance(value, dict) or part not in value:
            parent = ".".join(parts[:number])
            what = f"{parent!r} is a {type(value).__name__}, not an object"
            if isinstance(value, dict):
                what = (
                    f"{f'{parent!r} has no key' if parent else 'no column'} {part!r}; {choices(part, map(str, value))}"
                )
            raise ConfigError(
                f"{where}: answer_field = {path!r}: {clean(what, 500)}; correct data.answer_field, or answer_field of "
                f"the source"
            )
        value = value[part]
    return value


def _without_answer(row: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return a row without the answer that `answer_of` finds."""
    column, dot, rest = path.partition(".")
    if dot and path not in row and isinstance(row.get(column), dict):
        return {**row, column: _without_answer(row[column], rest)}
    return {name: value for name, value in row.items() if name != path}


def fill_template(template: str, row: Mapping[str, Any], where: str) -> str:
    """Return a template with the values of its columns as `answer_text` writes them."""
    filled = ""
    for text, column in parse_template(template):
        filled += text
        if not column:
            continue
        if column not in row:
            raise ConfigError(
                f"{where}: no column {column!r}, which template = {template!r} names; it has {', '.join(sorted(row))}"
            )
        filled += answer_text(row[column])
    return filled


def _chat_messages(value: Any, data: DataConfig, where: str) -> list[dict[str, Any]]:
    """Return the chat messages of a prompt, with the recipe's system message before a text."""
    if isinstance(value, str):
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        return [*system, {"role": "user", "content": value}]
    try:
        return read_messages(value)
    except InvalidInput as error:
        raise ConfigError(f"{where}: {error.message}") from None


def _take_answer(messages: list[dict[str, Any]], data: DataConfig, where: str) -> Any:
    """Remove the last message, which is the assistant's, and return its text, or the list of its tool calls."""
    if not data.answer_from_messages:
        raise ConfigError(
            f"{where}: the last message is the assistant's, and the policy would answer after an answer; set "
            f"data.answer_from_messages = true to take it as the reference answer, or remove it"
        )
    last = messages.pop()
    if not messages or messages[-1]["role"] == "assistant":
        raise ConfigError(f"{where}: no message of another role stands before the assistant's last one; remove the row")
    return last["content"] or last.get("tool_calls", "")


def tokenize(raw: RawPrompt, data: DataConfig, tokenizer: PromptTokenizer, where: str) -> tuple[str, list[int]]:
    """Return a prompt as text and as token ids. The texts of special tokens in messages and tools are plain text."""
    if raw.messages is not None:
        try:
            rendered = tokenizer.render_chat(tokenizer.escape(raw.messages), tools=tokenizer.escape(raw.tools))
        except InvalidInput as error:
            raise ConfigError(f"{where}: {error.message}; change the row, or use another chat template") from None
        return tokenizer.unescape(rendered), tokenizer.encode(rendered)
    if not isinstance(raw.value, str):
        raise ConfigError(f"{where}: a {type(raw.value).__name__} as prompt; data.chat = false needs a text")
    text = f"{data.system_prompt}\n\n{raw.value}" if data.system_prompt else raw.value
    return text, tokenizer.encode(text, add_special=True)


def _group_key(index: int, text: str, metadata: dict[str, Any], holdout: HoldoutConfig | None, where: str) -> str:
    if holdout is None:
        return f"row {index}"
    if holdout.field and holdout.field not in metadata:
        raise ConfigError(
            f"data.holdout.field = {holdout.field!r}: {where} has no such field; it has "
            f'{", ".join(sorted(metadata)) or "none"}; name one of them, or write "" for the prompt itself'
        )
    value = str(metadata[holdout.field]) if holdout.field else text
    if not holdout.unordered_numbers:
        return value
    return " ".join(sorted(_NUMBER.findall(value), key=lambda n: (float(n), n)))


def find_overlaps(train: Sequence[Prompt], held_out: Sequence[HeldOutSet]) -> list[str]:
    """Return a text on each held-out set with a source of its own that has prompts of the training data.

    Case, white space and forms of letters are ignored.
    """
    sets = [(held.name, [(_content(p), p) for p in held.prompts]) for held in held_out if held.rule.source is not None]
    wanted = {content for _, prompts in sets for content, _ in prompts}
    rows = dict[str, int]()  # the first training row of each content
    for prompt in train:
        if (content := _content(prompt)) in wanted:
            rows.setdefault(content, prompt.index)
    found = []
    for name, prompts in sets:
        if hits := [(prompt.index, rows[content]) for content, prompt in prompts if content in rows]:
            found.append(
                f"{len(hits):,} of {len(prompts):,} prompts of the held-out set {name} are training prompts, too "
                f"(case and spaces are ignored), so its score would also measure memorized answers: row "
                f"{hits[0][0]} is training row {hits[0][1]}; remove them from one of the two"
            )
    return found


def _content(prompt: Prompt) -> str:
    """Return the normalized text of a prompt, without system messages: these may differ between sets."""
    messages = json.loads(prompt.messages_json) if prompt.messages_json else []
    asked = [f"{message['role']}: {message['content']}" for message in messages if message["role"] != "system"]
    text = "\n".join(asked) or prompt.text
    return " ".join((text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold().split())
