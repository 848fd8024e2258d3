"""LoRA by PEFT: adapters in the linear layers of a model, as trainer, engines and a user's own scripts see them.

    in the model     model.layers.0.self_attn.q_proj.base_layer.weight          frozen
                     model.layers.0.self_attn.q_proj.lora_A.default.weight      trained, and so is lora_B
    sent, exported   model.layers.0.self_attn.q_proj.weight                     W + scale * B A
    for PEFT         base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight

Nothing but the adapters has a gradient, a master or a place in a checkpoint. `policy-lora.json` beside them says what
they belong to: one of another rank, of other layers, or on top of other weights is refused.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from fourfold.config import LoraConfig
from fourfold.errors import ConfigError, WrongState
from fourfold.plan.models import select_adapter_layers
from fourfold.weights.source.lora import Adapter
from fourfold_trainer.checkpoint import store

RECORD_FILE: Final = "policy-lora.json"
_A: Final = ".lora_A.default.weight"  # "default" is the name that PEFT gives to an adapter
_B: Final = ".lora_B.default.weight"
# Elements of each base weight that its fingerprint looks at.
_SAMPLED: Final = 1024


class Adapters:
    """The adapters of one model."""

    def __init__(self, config: LoraConfig, model: Any, *, source: Path, seed: int) -> None:
        """Put adapters into `model`, in place, and freeze all else; what the model computes stays the same.

        Args:
            config: with a rank above 0.
            model: whole on this rank, with its output embedding replaced: that one gets no adapter.
            source: folder of the model.
            seed: of A; B is 0.

        Raises:
            ConfigError: PEFT is not installed, or the model has no such layer; the model is as it was.
        """
        peft = _import_peft(config)
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        layers = select_adapter_layers(linear, config)
        self._record = {
            "rank": config.rank,
            "scale": config.scale,
            "layers": layers,
            "base": _fingerprint(model),
        }
        self._peft_config: Any = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            use_rslora=config.use_rslora,
            target_modules=layers,
            base_model_name_or_path=str(source),
            inference_mode=False,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # the same on every rank, however many there are
            peft.inject_adapter_in_model(self._peft_config, model)
        self._parameters: dict[str, Any] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.by_weight = {
            f"{name.removesuffix(_A)}.weight": Adapter(
                a=parameter, b=self._parameters[name.removesuffix(_A) + _B], scale=config.scale
            )
            for name, parameter in self._parameters.items()
            if name.endswith(_A)
        }
        """By the base model's name of the weight that they belong to."""

    @property
    def parameters(self) -> list[Any]:
        """All that is trained."""
        return list(self._parameters.values())

    def rename(self, name: str) -> str:
        """Return the base model's name of a parameter; empty for one of an adapter."""
        return "" if name in self._parameters else name.replace(".base_layer.", ".")

    def write(self, folder: Path) -> None:
        """Write a folder that `peft.PeftModel.from_pretrained` reads, durably. The adapters must be whole on this rank.

        Raises:
            Unavailable: the disk refuses.
        """
        settings = self._peft_config.to_dict() | {"inference_mode": True}
        tensors = {
            f"base_model.model.{name.replace('.default.', '.')}": parameter.detach().cpu()
            for name, parameter in self._parameters.items()
        }
        store.write_adapter(folder, json.dumps(settings, indent=2, sort_keys=True, default=sorted), tensors)

    def write_record(self, folder: Path) -> None:
        """Write what a checkpoint's adapters belong to, durably."""
        store.write_text(folder / RECORD_FILE, json.dumps(self._record, indent=1))

    @property
    def record(self) -> dict[str, Any]:
        """What must be equal in a trainer that loads them."""
        return self._record


def check_record(folder: Path, mine: Adapters | None) -> None:
    """Refuse a checkpoint of other adapters, of adapters where there are none, and the other way round.

    Raises:
        WrongState: says what differs.
    """
    path = folder / RECORD_FILE
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise WrongState(f"{path} cannot be read ({error}); restore another checkpoint") from None
    wanted = mine.record if mine else {}
    for key in ("rank", "scale", "layers", "base"):
        if found.get(key) != wanted.get(key):
            raise WrongState(
                f"{folder} was written {_said(key, found)}, the trainer runs {_said(key, wanted)}; start it as it was, "
                f"or begin a new run from an exported model"
            )


def _said(key: str, record: dict[str, Any]) -> str:
    """Return one entry of a record in words."""
    match key:
        case "rank":
            return f"with trainer.lora.rank = {record.get(key, 0)}"
        case "scale":
            return f"with a scale of {record[key]:g} (from trainer.lora.alpha)"
        case "layers":
            kinds = ", ".join(sorted({name.rpartition(".")[2] for name in record[key]}))
            return f"with adapters in {len(record[key])} layers ({kinds})"
    return f"on top of the base weights {record[key][:12]}"


def _import_peft(config: LoraConfig) -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(
            f"trainer.lora.rank = {config.rank} needs PEFT, which cannot be imported ({error}); "
            f"pip install 'fourfold-trainer[lora]', or set it to 0"
        ) from None


@torch.no_grad()
def _fingerprint(model: nn.Module) -> str:
    """Return a digest of some elements of every weight: enough to tell one trained model from another."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // _SAMPLED)].contiguous().cpu()
        digest.update(f"{name} {tuple(parameter.shape)} ".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
