"""The numbers of one `fourfold bench step`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold_bench import checks
from fourfold_bench.shapes import kv_bytes_per_token

_GIB: Final = 1 << 30
_ROUND_UP: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One benchmark."""

    shape: str
    device: str
    """"cpu" or "cuda"."""
    layout: str
    """separate: trainer and reference on the first GPU, the engine on the second. hybrid: on both GPUs a rank of the
    trainer, an engine and a reference. shared: the same on one GPU."""
    sleep: bool
    """Engines give their memory up while the trainer works."""
    prompts: int
    prompt_tokens: int
    new_tokens: int
    group_size: int
    warm_up: int
    steps: int
    """That are measured."""
    kl_coef: float
    tokens_per_micro_batch: int
    reference_tokens: int
    """Of one pass of the reference."""
    batched_tokens: int
    """Of one engine step; 0: the default."""
    liger: bool
    checkpointing: bool
    backend: str
    """Of the weights."""
    kv_cache_gib: int
    """0: what all samples of an engine need."""
    peak_tflops: float
    """Of one GPU; what it does at most, in TFLOP/s."""
    profiled: bool
    """The run is profiled in one more step, which does not count."""
    stop: bool = False
    """The run is stopped when its steps are measured, before its last step, checkpoint and export."""
    timeout: float
    """Seconds for the whole run."""

    def __post_init__(self) -> None:
        """Check what argparse cannot.

        Raises:
            ConfigError: numbers that make no sense together.
        """
        checks.at_least(1, self, "prompts", "prompt_tokens", "new_tokens", "warm_up", "steps")
        checks.at_least(0, self, "batched_tokens", "kv_cache_gib")
        checks.at_least(self.context, self, "tokens_per_micro_batch", *(["reference_tokens"] if self.kl_coef else []))
        checks.timeout(self.timeout)
        if self.group_size < 2:
            raise ConfigError(f"--group-size {self.group_size}: advantages compare the samples of a prompt; at least 2")
        if self.peak_tflops <= 0:
            raise ConfigError(f"--peak-tflops {self.peak_tflops}: it must be above 0")
        if self.sleep and not (self.shares_gpus and self.on_gpus):
            raise ConfigError(
                "--sleep is for engines that share GPUs with the trainer: --layout hybrid or shared, --device cuda"
            )
        if self.liger and not self.on_gpus:
            raise ConfigError("--liger: these kernels run on GPUs alone; leave it out, or take --device cuda")

    @property
    def on_gpus(self) -> bool:
        """Whether it needs GPUs."""
        return self.device == "cuda"

    @property
    def replicas(self) -> int:
        """Engines, and references."""
        return 2 if self.layout == "hybrid" else 1

    @property
    def ranks(self) -> int:
        """Of the trainer."""
        return 2 if self.layout == "hybrid" else 1

    @property
    def shares_gpus(self) -> bool:
        """Whether engines and trainer take turns on the same GPUs."""
        return self.layout != "separate"

    @property
    def gpus(self) -> int:
        """That the whole run has."""
        if not self.on_gpus:
            return 0
        return 1 if self.layout == "shared" else 2

    @property
    def last_step(self) -> int:
        """Of those that are measured or profiled; one more follows, which writes the checkpoint."""
        return self.warm_up + self.steps + self.profiled

    @property
    def samples(self) -> int:
        """Of one step."""
        return self.prompts * self.group_size

    @property
    def context(self) -> int:
        """Tokens of the longest sample, a little rounded up."""
        return -(-(self.prompt_tokens + self.new_tokens) // _ROUND_UP) * _ROUND_UP

    @property
    def engine_samples(self) -> int:
        """That one engine has at once."""
        return -(-self.prompts // self.replicas) * self.group_size

    @property
    def engine_cache_gib(self) -> int:
        """Keys and values of one engine, in GiB."""
        needed = self.engine_samples * self.context * kv_bytes_per_token(self.shape)
        return self.kv_cache_gib or max(1, -(-needed * 5 // 4 // _GIB))

    @property
    def dealt_gpus(self) -> list[int]:
        """GPUs of this machine as the run numbers them: engine, trainer, reference, where they are separate."""
        return list(range(self.gpus)) if self.shares_gpus else [1, 0, 0]

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)
