"""The numbers of one `fourfold bench rollout`, and what both sides derive from them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from fourfold.config.table import MIN_TEMPERATURE
from fourfold.errors import ConfigError
from fourfold_bench import checks
from fourfold_bench.shapes import SHAPES, kv_bytes_per_token

ALONE: Final = ("plain", "logprobs", "seeds")
"""Ways to call vLLM alone: without logprobs; with logprobs=0, flat; and with a seed in every request on top."""
_ROUND_UP: Final = 16
_FIRST_WORD: Final = 3
GREEDY_TOKENS: Final = 64
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One benchmark."""

    shape: str
    device: str
    """"cpu" or "cuda:0", ..."""
    prompts: int
    prompt_tokens: int
    new_tokens: int
    group_size: int
    """Samples of one prompt, in one call."""
    temperature: float
    warm_up: int
    rounds: int
    clients: int
    """Processes that call the service."""
    streams: int
    """Interactive callers in some more rounds; 0: none, and no such rounds."""
    flush_seconds: float
    """How often an interactive caller wants its tokens."""
    packed: bool
    """Refuse a service that gets log-probabilities from vLLM's own path."""
    alone: tuple[str, ...]
    """Of ALONE; what the service is compared with."""
    engine_memory: float
    batched_tokens: int
    eager: bool
    profiled: bool
    """The service is profiled in one more round, which does not count."""
    timeout: float
    """Seconds for one round."""

    def __post_init__(self) -> None:
        """Check what argparse cannot.

        Raises:
            ConfigError: numbers that make no sense together.
        """
        checks.at_least(1, self, "prompts", "prompt_tokens", "new_tokens", "group_size", "rounds", "clients")
        checks.at_least(0, self, "warm_up", "streams", "batched_tokens")
        checks.flush(self.flush_seconds)
        checks.engine_memory(self.engine_memory)
        checks.timeout(self.timeout)
        if self.clients > self.prompts:
            raise ConfigError(f"--clients {self.clients} cannot share {self.prompts} prompts; each takes at least one")
        if not MIN_TEMPERATURE <= self.temperature <= 2:
            raise ConfigError(f"--temperature {self.temperature}: it must be at least {MIN_TEMPERATURE} and at most 2")
        if unknown := set(self.alone) - set(ALONE):
            raise ConfigError(f"--alone {','.join(sorted(unknown))}; known are {', '.join(ALONE)}")

    @property
    def on_gpu(self) -> bool:
        """Whether the engine is on a GPU."""
        return self.device != "cpu"

    @property
    def plain_rounds(self) -> int:
        """Of the batch alone: to warm up, measured, and the one that is profiled."""
        return self.warm_up + self.rounds + self.profiled

    @property
    def samples(self) -> int:
        """Of one round."""
        return self.prompts * self.group_size

    @property
    def tokens(self) -> int:
        """That one round samples."""
        return self.samples * self.new_tokens

    @property
    def context(self) -> int:
        """Tokens of the longest sample, a little rounded up."""
        return -(-(self.prompt_tokens + max(self.new_tokens, GREEDY_TOKENS)) // _ROUND_UP) * _ROUND_UP

    @property
    def vocabulary(self) -> int:
        """Tokens that there are."""
        return int(SHAPES[self.shape]["vocab_size"])

    @property
    def kv_cache_gib(self) -> int:
        """What an engine on CPU needs for all samples at once, in GiB."""
        needed = (self.samples + self.streams) * self.context * kv_bytes_per_token(self.shape)
        return max(1, -(-needed * 5 // 4 // _GIB))

    def prompt(self, round_index: int, index: int) -> list[int]:
        """Return the tokens of a prompt; no two rounds share one, so that no prefix is cached."""
        random = np.random.default_rng((1 + round_index, index))
        return [int(token) for token in random.integers(_FIRST_WORD, self.vocabulary, self.prompt_tokens)]

    def write(self, path: Path) -> Path:
        """Write it for a child process; return the path."""
        path.write_text(json.dumps(self.document()), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Read what `write` wrote."""
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(**values | {"alone": tuple(values["alone"])})

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self) | {"alone": list(self.alone)}
