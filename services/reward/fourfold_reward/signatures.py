"""Runs reward functions of OpenRLHF and TRL as they are: recognises a signature, converts call and result.

    Fourfold    function(sample)                                     -> number, Score, Abstain, mapping or None
    OpenRLHF    function(queries, prompts, labels)                   -> tensor, or {"rewards", "scores", "extra_logs"}
    TRL         function(prompts, completions, **columns of the row) -> list of numbers or None

The functions of OpenRLHF and TRL take batches. They get batches of one sample, so that the time limit, an error and the
sandbox concern that sample alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

from fourfold.reward.function import Result, RewardFunction, Score, ScoreInput
from fourfold_reward.scores import InvalidSample, components_of

_OPENRLHF: Final = frozenset({"queries", "prompts", "labels"})
_TOKENS: Final = ("completion_ids", "completions_ids")  # the second is the spelling of older documents
_TRL: Final = frozenset({"completions", *_TOKENS})
_OF_A_TRAINER: Final = ("trainer_state", "environments")  # arguments that TRL passes and a scorer cannot have
_FORMS: Final = (
    "a reward function takes (sample), or OpenRLHF's (queries, prompts, labels), or TRL's "
    "(prompts, completions, **columns)"
)


class Reads(NamedTuple):
    """The inputs of a function besides texts and columns."""

    tokens: bool = False
    messages: bool = False


def adapt(function: Callable[..., Any], *, answer_fields: Sequence[str]) -> tuple[RewardFunction, Reads]:
    """Return a function of one sample that calls `function` with the arguments of its signature, and its inputs.

    Args:
        function: of one of the three forms; plain or async.
        answer_fields: columns with the reference answer: that of [data], and those of sources with another one.

    Raises:
        TypeError: the signature is none of these, or needs values that only a trainer has.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # C code
        return function, _declared(function)
    names = signature.parameters.keys()
    if names >= _OPENRLHF:
        return _wrap(function, _call_openrlhf), Reads()
    if names & _TRL:
        for name in _OF_A_TRAINER:
            if name in names and signature.parameters[name].default is inspect.Parameter.empty:
                raise TypeError(f"it needs {name}, which only a trainer of TRL has; give the parameter a default")
        call = functools.partial(_call_trl, _TrlForm.of(signature, answer_fields))
        return _wrap(function, call), Reads(tokens=not names.isdisjoint(_TOKENS), messages=True)
    try:
        signature.bind(object())
    except TypeError as error:
        raise TypeError(f"it takes {signature}, and {error}; {_FORMS}") from None
    return function, _declared(function)


def _declared(function: Callable[..., Any]) -> Reads:
    """Return the inputs that a function of Fourfold declares by its attributes `reads_tokens` and `reads_messages`."""
    found = (getattr(function, name, False) is True for name in ("reads_tokens", "reads_messages"))
    return Reads(*found)


def _wrap(
    function: Callable[..., Any], call: Callable[[Callable[..., Any], ScoreInput], tuple[Any, Callable[[Any], Result]]]
) -> RewardFunction:
    @functools.wraps(function)
    def score(sample: ScoreInput) -> Any:
        answer, convert = call(function, sample)
        return _converted(answer, convert) if inspect.isawaitable(answer) else convert(answer)

    return score


async def _converted(answer: Any, convert: Callable[[Any], Result]) -> Result:
    return convert(await answer)


# -- OpenRLHF ---------------------------------------------------------------------------------------------------------


def _call_openrlhf(function: Callable[..., Any], sample: ScoreInput) -> tuple[Any, Callable[[Any], Result]]:
    label = "" if sample.answer_value is None else sample.answer_value
    return function([sample.prompt + sample.completion], [sample.prompt], [label]), _openrlhf_result


def _openrlhf_result(answer: Any) -> Result:
    """Return the reward; `scores` and the numbers of `extra_logs` are its components."""
    if not isinstance(answer, Mapping):
        return _with_components(_only(answer, "the function"), {})
    if "rewards" not in answer:
        raise TypeError(f"it returned a mapping with {', '.join(map(str, answer)) or 'no key'}; it needs `rewards`")
    logs = answer.get("extra_logs")
    entries = {"scores": answer.get("scores")} | (dict(logs) if isinstance(logs, Mapping) else {})
    return _with_components(_only(answer["rewards"], "rewards"), entries)


# -- TRL --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TrlForm:
    """The parameters of a function of TRL; its answer is named by the last parts of COLUMN.KEY."""

    names: Collection[str]
    required: Collection[str]
    any_column: bool  # it takes **kwargs
    answer_names: Sequence[str]

    @classmethod
    def of(cls, signature: inspect.Signature, answer_fields: Sequence[str]) -> _TrlForm:
        parameters = signature.parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        return cls(
            names=frozenset(p.name for p in named),
            required=frozenset(p.name for p in named if p.default is p.empty),
            any_column=any(p.kind is p.VAR_KEYWORD for p in parameters),
            answer_names=[field.rpartition(".")[2] for field in answer_fields],
        )


def _call_trl(form: _TrlForm, function: Callable[..., Any], sample: ScoreInput) -> tuple[Any, Callable[[Any], Result]]:
    metrics: dict[str, Any] = {}
    completion = [{"role": "assistant", "content": sample.completion}] if sample.messages else sample.completion
    answer = sample.answer_value
    # The row of one source may have another column under the name that another source has its answer under.
    columns = {**dict.fromkeys(form.answer_names, answer), **sample.metadata, form.answer_names[0]: answer}
    arguments = {name: [value] for name, value in columns.items()} | {
        "prompts": [list(sample.messages) if sample.messages else sample.prompt],
        "completions": [completion],
        **{name: [list(sample.completion_ids)] for name in _TOKENS},
        "log_extra": lambda name, values: None,  # texts, for TRL's table of completions
        "log_metric": metrics.__setitem__,
    }
    if missing := sorted(set(form.required) - arguments.keys()):
        raise InvalidSample(
            "BAD_METADATA", f"the row has no column {missing[0]!r:.100}; it has {', '.join(sorted(columns)):.500}"
        )
    if not form.any_column:
        arguments = {name: value for name, value in arguments.items() if name in form.names}
    return function(**arguments), lambda answer: _with_components(_only(answer, "the function"), metrics)


# -- results ----------------------------------------------------------------------------------------------------------


def _only(values: Any, what: str) -> Any:
    """Return the one element of a list, array or tensor, or a number that is not in one."""
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        return values
    if getattr(values, "ndim", 1) == 0:
        return values.item()
    if len(values) != 1:
        raise TypeError(f"{what} returned {len(values)} rewards for a batch of 1 sample; return one for each")
    return _only(values[0], what)


def _with_components(result: Any, entries: Mapping[str, Any]) -> Result:
    """Add the entries that are single numbers, because the run logs only those."""
    if not isinstance(result, int | float) and not hasattr(result, "__float__"):
        return cast(Result, result)  # such as None, which abstains; the caller checks it
    values: dict[str, Any] = {}
    for name, raw in entries.items():
        with contextlib.suppress(TypeError):
            values[str(name)] = _only(raw, name)
    components = components_of(values)
    return Score(result, components) if components else result
