"""What is measured: the numbers of one benchmark."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold_bench import checks
from fourfold_bench.shapes import SHAPES

_MIN_CONTEXT: Final = 64  # a stream has its prompt and half of the rest, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One benchmark."""

    path: str
    """"direct": the library alone; "services": through gRPC."""
    shape: str
    backend: str
    """"auto": shm on CPU; cuda_ipc on GPUs."""
    trainer_devices: tuple[str, ...]
    """One for each rank: "cpu", "cuda:0", ..."""
    engine_device: str
    zero3: bool
    """Real ZeRO-3 ranks; otherwise one rank with whole parameters."""
    rounds: int
    warm_up: int
    verified_rounds: int
    """Rounds with sums, after those without."""
    streams: int
    """Requests that decode all the time; 0: the engine is idle."""
    flush_seconds: float
    """How often a stream wants its tokens; "services" alone."""
    context: int
    """Tokens of a request."""
    engine_memory: float
    """Part of the GPU that vLLM may take."""
    eager: bool
    loop: bool
    """Compare with an update that goes tensor by tensor."""
    timeout: float
    """Seconds for one phase of an update."""
    profile: str = ""
    """File for a profile of the engine's worker; empty: none."""

    def __post_init__(self) -> None:
        """Check what argparse cannot.

        Raises:
            ConfigError: numbers or devices that make no sense together.
        """
        if self.shape not in SHAPES:
            raise ConfigError(f"--shape {self.shape}; known are {', '.join(SHAPES)}")
        if len(self.trainer_devices) > 1 and not self.zero3:
            raise ConfigError("several trainer devices need --zero3: whole parameters are sent by one rank alone")
        devices = {*self.trainer_devices, self.engine_device}
        if len({device.partition(":")[0] for device in devices}) > 1:
            raise ConfigError(f"devices {sorted(devices)}: trainer and engine must both be on CPU or both on GPUs")
        if not self.on_gpus and self.backend in ("cuda_ipc", "nccl"):
            raise ConfigError(
                f"--backend {self.backend} moves weights between GPUs, and these are on CPU; take shm or gloo"
            )
        if self.profile and self.path == "services":
            raise ConfigError(f"--profile {self.profile}: the services have no worker to look into; take --path direct")
        checks.at_least(1, self, "rounds", "warm_up", "verified_rounds")
        checks.at_least(0, self, "streams")
        checks.at_least(_MIN_CONTEXT, self, "context")
        checks.flush(self.flush_seconds)
        checks.engine_memory(self.engine_memory)
        checks.timeout(self.timeout)

    @property
    def on_gpus(self) -> bool:
        """Whether it needs GPUs."""
        return self.engine_device != "cpu"

    @property
    def chosen_backend(self) -> str:
        """The backend that is used."""
        if self.backend != "auto":
            return self.backend
        return "cuda_ipc" if self.on_gpus else "shm"

    @property
    def loop_is_possible(self) -> bool:
        """Whether the loop can run: NCCL refuses two ranks on one GPU. Of the trainer rank 0 alone takes part."""
        return not self.on_gpus or self.engine_device != self.trainer_devices[0]

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self) | {"trainer_devices": list(self.trainer_devices), "backend": self.chosen_backend}
