"""Defines the tables of the scorers: `[reward]`, or several `[[reward]]`, whose scores are mixed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from fourfold.config.rows import STEP_SEPARATOR
from fourfold.config.table import GpuType, Name, Seconds, check_gpu_type
from fourfold.table import Table
from fourfold.text import public_url

MAX_SCORERS: Final = 64
_KINDS: Final = ("function", "target", "command", "model", "http", "judge")
ANSWER_VERIFIERS: Final = ("exact_match", "last_number", "math_verify")
"""Built-in functions that compare with the reference answer, and abstain without one."""
Number = Annotated[float, Field(ge=-1e6, le=1e6)]


def _check_address(value: str) -> str:
    if value and not value.startswith(("http://", "https://")):
        # The value is not shown: it may have a key, and its parts are unknown.
        raise ValueError("the address does not begin with http:// or https://; write http://HOST:PORT/PATH")
    return value


WebAddress = Annotated[str, AfterValidator(_check_address)]


class RewardModelConfig(Table):
    """A reward model of Hugging Face, `model = {...}`: AutoModelForSequenceClassification with one label, or
    AutoModelForTokenClassification, which scores steps."""

    kind: Literal["score", "process"] = "score"
    """score: one score for the whole text. process: one at the end of each step of the answer; that of the last step is
    the score of the sample, those of the others are token rewards."""
    steps: str = Field(default=STEP_SEPARATOR, min_length=1)
    """Text after each step, with which the process model was trained: `data.step_separator`. With kind = "process"."""
    source: str = Field(min_length=1)
    """Folder of the model, relative to the working directory, `hf:OWNER/NAME`, or `run:NAME` as in `model.source`."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: each replica has `gpus_per_replica` GPUs."""
    own_gpus: bool = False
    """Give it GPUs of its own also where the other services share theirs (`placement.colocated = true`)."""
    gpu: GpuType = ""
    """Type of its GPUs, as `rollout.gpu`. Empty: any."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of its weights."""
    tokens_per_batch: int = Field(default=16_384, ge=16)
    """Most tokens of one forward pass; texts are packed without padding."""
    max_tokens: int = Field(default=0, ge=0)
    """Longest text; a longer one has the error TOO_LONG. 0: the model's own limit."""
    gpus_per_replica: int = Field(default=1, ge=1)
    """GPUs over which one replica splits the model; more than 1 for a model too large for one."""
    chat: bool = True
    """Apply the model's own chat template to the messages of prompt and completion, if it has one. false: the text is
    prompt and completion as the policy saw them."""

    @model_validator(mode="after")
    def _check_gpu(self) -> Self:
        check_gpu_type(self.gpu, self.device)
        if self.kind == "score" and self.steps != STEP_SEPARATOR:
            raise ValueError(
                f'steps = {self.steps!r} is for scores of steps, and kind = "score"; set kind = "process" with a '
                f"process reward model, or remove it"
            )
        return self


class JudgeConfig(Table):
    """A generative judge, `judge = {...}`: a model behind an OpenAI-compatible endpoint that reads a rubric."""

    url: WebAddress = Field(min_length=1)
    """Base address of the endpoint, such as http://127.0.0.1:8000/v1."""
    model: str = Field(min_length=1)
    """Name of the model at the endpoint."""
    rubric: str = ""
    """File with the text of the request. It may have the placeholders {prompt}, {completion}, {answer} and {FIELD} of
    the row; {{ and }} are braces. Empty: a general rubric with a scale from 0 to 10."""
    system: str = ""
    """System message; empty: none."""
    pattern: str = r"(?i)score\s*[:=]\s*(-?\d+(?:\.\d+)?)"
    """Regular expression; its first group in the last match is the grade. No match: the error BAD_VERDICT."""
    grade_min: float = 0.0
    """Lowest grade of the rubric."""
    grade_max: float = 10.0
    """The score is (grade - grade_min) / (grade_max - grade_min); another grade is the error BAD_VERDICT."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature of the judge."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest verdict."""
    api_key_env: str = ""
    """Environment variable with the key of the endpoint; empty: none."""
    concurrency: int = Field(default=32, ge=1, le=1024)
    """Requests at the same time, per replica."""
    tries: int = Field(default=3, ge=1, le=10)
    """Requests for one sample: 429, 5xx, a broken connection and a verdict without a grade are tried again."""
    input_usd_per_million: float = Field(default=0.0, ge=0)
    """Price of a million tokens of requests, for the cost counters and `max_cost_usd`."""
    output_usd_per_million: float = Field(default=0.0, ge=0)
    """Price of a million tokens of verdicts."""

    @model_validator(mode="after")
    def _grades(self) -> Self:
        if self.grade_min >= self.grade_max:
            raise ValueError(
                f"grade_min = {self.grade_min:g} is not below grade_max = {self.grade_max:g}; give the lowest and the "
                f"highest grade of the rubric"
            )
        return self


class RewardConfig(Table):
    """`[reward]` or `[[reward]]`: one scorer, its services, and its part in the score of a sample.

    Exactly one of function, target, command, model, http and judge says what scores.
    """

    name: Name = "reward"
    """Name in metrics, records and commands; different for each table."""
    function: str = ""
    """A built-in name (`fourfold serve reward --list`), `package.module:function`, or `file.py:function`; a function
    may have the signature of Fourfold, OpenRLHF or TRL (docs/rewards.md). Without any of the six keys: exact_match."""
    target: tuple[str, ...] = Field(default=(), strict=False)
    """Addresses HOST:PORT of reward services that run already, in any language; one, or a list. The coordinator calls
    them, and they need no registration. The launcher starts none, and `replicas` has no meaning then."""
    command: tuple[str, ...] = Field(default=(), strict=False)
    """A program with its arguments, or one text without arguments. It reads one sample per line from stdin, as a JSON
    object, and writes one result per line to stdout (docs/rewards.md)."""
    model: RewardModelConfig | None = None
    """A reward model: the folder of the model, or a table with `source`."""
    http: WebAddress = ""
    """URL of an OpenRLHF reward server, such as http://127.0.0.1:5000/get_reward."""
    judge: JudgeConfig | None = None
    """A generative judge."""
    options: dict[str, Any] = Field(default={})
    """Options of a built-in `function`, such as the pattern of `format`."""

    weight: Number = 1.0
    """Factor of its score in the sum."""
    gate: Number | None = None
    """Lowest score with which the terms of other scorers count. Below it, they are left out, and are not even asked."""
    abstain: Literal["drop", "omit"] = "drop"
    """Reaction to a sample that the scorer cannot judge. drop: the sample is dropped. omit: the sum goes without this
    term."""
    where: dict[str, Annotated[tuple[str, ...], Field(strict=False)]] = Field(default={})
    """Samples that it scores, by columns of the data: `where = { task = ["math", "code"] }`. Empty: all."""
    max_cost_usd: float = Field(default=0.0, ge=0)
    """Most US dollars that the whole run may spend on this scorer, with evaluations, canaries and shadows. Then, with
    on_error = "drop", samples are dropped (COST_LIMIT); otherwise the run ends. 0: no limit."""
    replicas: int = Field(default=1, ge=0)
    """Services that the launcher starts; 0: they are started by hand."""
    timeout_seconds: Seconds = 10.0
    """Longest time to score one sample; then its outcome is an error."""
    processes: int = Field(default=1, ge=1)
    """Worker processes of one service, for `function` and `command`. While samples of a function hang, a service starts
    extra ones in their place: at most 8 for each of these, and at most 64 together."""
    on_error: Literal["wait", "drop", "stop"] = "wait"
    """Reaction of the run to a scorer that fails: it is gone, hangs, sends invalid replies, or has an error for every
    sample. A missing score is never a zero. wait: samples wait until a scorer works again, at most `wait_seconds`.
    drop: samples are dropped with the reason after their last try (`retry`). stop: the run ends after the last try. If
    only some samples have an error, wait drops these, too."""
    wait_seconds: Seconds = 1800.0
    """Longest time that a run waits for a scorer that fails; then it ends with the first error."""
    lost_rounds: int = Field(default=3, ge=1)
    """Limit of the groups that a step loses to missing scores, in multiples of `batch.prompts_per_step`. The run ends
    with the reasons if a step reaches the limit before any of its groups has scores. The largest of all tables is the
    limit."""
    evaluate_text: bool = False
    """Allow functions that run text of the answer as code (`fourfold serve reward --list` marks them). They run in a
    sandbox."""
    sandbox: Literal["auto", "off"] = "auto"
    """auto: scorers run with few rights, as far as the machine can enforce it (see `fourfold doctor`). off: with all
    rights and environment variables of the service."""
    network: bool = False
    """Allow a function or command of yours to open sockets."""
    environment: tuple[str, ...] = Field(default=(), strict=False)
    """Names of environment variables for a function or command of yours, in addition to PATH, HOME and similar ones."""
    memory_gib: int = Field(default=8, ge=1)
    """Maximum private memory of one process of a function or command of yours."""

    @property
    def columns(self) -> frozenset[str] | None:
        """Columns of a row that its function reads besides prompt and answer; None: they are not known."""
        if self.function == "code_tests":
            return frozenset({str(self.options.get("field", "tests"))})
        return frozenset() if self.function in (*ANSWER_VERIFIERS, "format", "length") else None

    @model_validator(mode="before")
    @classmethod
    def _default_function(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if any(key not in cls.model_fields for key in value):  # perhaps the misspelt kind: that error comes first
            return value
        given = [kind for kind in _KINDS if kind in value]
        if not given:
            return {**value, "function": "exact_match"}
        if not any(value[kind] for kind in given):
            raise ValueError(
                f"{given[0]} = {value[given[0]]!r} is empty, so that nothing scores; write what scores, or remove the "
                f"key for exact_match"
            )
        return value

    @field_validator("target", "command", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("model", mode="before")
    @classmethod
    def _folder_alone(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value

    @field_validator("where", mode="before")
    @classmethod
    def _one_value_alone(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {key: (found,) if isinstance(found, str) else found for key, found in value.items()}

    @field_validator("target")
    @classmethod
    def _different(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value) or not all(value):
            raise ValueError(f"target = {list(value)} has an address twice, or an empty one; remove it")
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [kind for kind in _KINDS if getattr(self, kind)]
        if len(given) > 1:
            raise ValueError(
                f"{' and '.join(given)} are {len(given)} ways to score; leave one, and add a table [[reward]] for each "
                f"other"
            )
        if self.options and self.kind != "function":
            raise ValueError(f"options = {self.options} are for a function, and this is a {self.kind}; remove them")
        return self

    @property
    def kind(self) -> str:
        """Which of the six keys is set."""
        return next(kind for kind in _KINDS if getattr(self, kind))

    @property
    def member_prefix(self) -> str:
        """What the member ids of its services begin with, in the alphabet of certificates."""
        return "reward" if self.name == "reward" else f"reward-{self.name.lower().replace('_', '-')}"

    @property
    def drop_prefix(self) -> str:
        """What the drop reasons of its samples begin with, if it is one of several scorers."""
        return f"{self.name.upper().replace('-', '_')}_"

    @property
    def title(self) -> str:
        """What scores, as one text for users, without the keys that an address may have."""
        match self.kind:
            case "function":
                return self.function
            case "target":
                return ", ".join(self.target)
            case "command":
                return " ".join(self.command)
            case "model":
                assert self.model is not None
                return self.model.source
            case "http":
                return public_url(self.http)
        assert self.judge is not None
        return f"{self.judge.model} at {public_url(self.judge.url)}"


def check_scorers(tables: Sequence[RewardConfig]) -> None:
    """Check all tables of a recipe together; ValueError has value, rule and fix."""
    if not 1 <= len(tables) <= MAX_SCORERS:
        raise ValueError(f"the recipe has {len(tables)} tables [[reward]]; write 1 to {MAX_SCORERS}")
    counts = Counter(table.name for table in tables)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            f"{counts[twice[0]]} tables [[reward]] have the name {twice[0]!r}; give each a `name` of its own"
        )
    prefixes = Counter(table.member_prefix for table in tables)
    if alike := [table.name for table in tables if prefixes[table.member_prefix] > 1]:
        raise ValueError(f"the names {alike} of [[reward]] differ in case, - and _ only; change one of them")
    if len(tables) > 1 and all(table.weight == 0 for table in tables):
        raise ValueError("all tables [[reward]] have weight = 0, so that every score is 0; give one a weight")
