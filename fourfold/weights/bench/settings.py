"""What is measured: shapes of models, and the numbers of one benchmark."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from fourfold.errors import ConfigError

# As it was when the benchmark began: it changes for the engine.
_LISTED: Final = os.environ.get("CUDA_VISIBLE_DEVICES", "")

_LLAMA: Final = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
_QWEN2: Final = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}


def _shape(base: dict[str, Any], sizes: tuple[int, int, int, int, int, int], *, tied: bool) -> dict[str, Any]:
    """Return a configuration; sizes are hidden, layers, heads, key and value heads, intermediate, vocabulary."""
    hidden, layers, heads, kv_heads, inner, words = sizes
    return base | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": words,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": "bfloat16",
    }


# Configurations of Hugging Face folders.
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "tiny": _shape(_LLAMA, (64, 2, 2, 1, 128, 512), tied=True),
    "0.135b": _shape(_LLAMA, (576, 30, 9, 3, 1536, 49_152), tied=True),  # SmolLM2-135M
    "0.43b": _shape(_LLAMA, (1024, 24, 16, 8, 4096, 49_152), tied=True),
    "7b": _shape(_QWEN2, (3584, 28, 28, 4, 18_944, 152_064), tied=False),  # Qwen2.5-7B
}


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
        if min(self.rounds, self.warm_up, self.verified_rounds, self.streams + 1) < 1:
            raise ConfigError("--rounds, --warm-up and --verified-rounds must be at least 1, and --streams at least 0")

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


def write_folder(folder: Path, shape: str) -> Path:
    """Write a model folder without weights: vLLM fills in its own, the trainer draws some."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=2), encoding="utf-8")
    return folder


def visible(*devices: str) -> dict[str, str]:
    """Return the environment of a process that shall see these devices alone, as its cuda:0, cuda:1, ..."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(physical_gpu(device) for device in devices if device != "cpu")}


def physical_gpu(device: str, listed: str = _LISTED) -> str:
    """Return what the driver calls a device that this process calls "cuda:1".

    Args:
        device: as torch writes it.
        listed: CUDA_VISIBLE_DEVICES of this process.
    """
    index = device.partition(":")[2] or "0"
    names = [name for name in listed.split(",") if name]
    if names and int(index) >= len(names):
        raise ConfigError(f"device {device}: CUDA_VISIBLE_DEVICES = {listed} lists {len(names)}")
    return names[int(index)] if names else index
