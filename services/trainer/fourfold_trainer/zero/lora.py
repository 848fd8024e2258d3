"""Adds PEFT's LoRA adapters to a model, exports them, and checks that a checkpoint's adapters fit the model.

    in the model     model.layers.0.self_attn.q_proj.base_layer.weight          frozen
                     model.layers.0.self_attn.q_proj.lora_A.default.weight      trained, and so is lora_B
    merged           model.layers.0.self_attn.q_proj.weight                     W + scale * B A
    for PEFT         base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight

`fourfold.plan.models.sends_adapters` says whether engines get the adapters or merged weights. Exports have both.

Only the adapters, and the head of a reward model, have gradients, master weights and tensors in a checkpoint.
`policy-lora.json` in a checkpoint records LoRA rank, scale, layers and base weights; a checkpoint that differs in one
of them is refused. Older checkpoints have another digest of the base weights, "base", which is not compared.
"""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from fourfold.config import LoraConfig
from fourfold.errors import ConfigError, WrongState
from fourfold.install import install_command
from fourfold.plan.models import select_adapter_layers
from fourfold.weights.base_fingerprint import fingerprint, sampled
from fourfold.weights.manifest import AdapterSpec
from fourfold.weights.source.fused_params import sent_parameters
from fourfold.weights.source.lora import Adapter
from fourfold_trainer.checkpoint import store

RECORD_FILE: Final = "policy-lora.json"
_A: Final = ".lora_A.default.weight"  # PEFT names an adapter "default"
_B: Final = ".lora_B.default.weight"
_BASE: Final = "base_fingerprint"

_log = logging.getLogger(__name__)


class LoraAdapters:
    """Injects adapters into one model and holds them."""

    def __init__(self, config: LoraConfig, model: Any, *, source: Path, seed: int) -> None:
        """Inject adapters into `model`, in place, and freeze all other parameters. The outputs stay the same: B is 0.

        Args:
            config: with a rank above 0.
            model: its output embedding was replaced and gets no adapter. The head of a reward model is trained itself.
            source: folder of the model, for PEFT's configuration.
            seed: of A.

        Raises:
            ConfigError: PEFT is not installed, or the model has no such layer; the model is unchanged.
        """
        try:
            peft: Any = importlib.import_module("peft")
        except ImportError as error:
            raise ConfigError(
                f"trainer.lora.rank = {config.rank} needs PEFT, which cannot be imported ({error}); "
                f"{install_command('fourfold-trainer[lora]')}, or set it to 0"
            ) from None
        head = getattr(model, "score", None)
        linear = [
            name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
        ]
        layers = select_adapter_layers(linear, config)
        self.record: dict[str, Any] = {
            "rank": config.rank,
            "scale": config.scale,
            "layers": layers,
            _BASE: base_fingerprint(model),
        }
        of_scores = "TOKEN_CLS" if getattr(model, "scores_steps", False) else "SEQ_CLS"
        self._peft_config: Any = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            use_rslora=config.use_rslora,
            target_modules=layers,
            base_model_name_or_path=str(source),
            inference_mode=False,
            task_type="CAUSAL_LM" if head is None else of_scores,
        )
        with torch.random.fork_rng(devices=[]):
            # The policy's random state differs by rank; A must not, or the ranks would train different adapters.
            torch.default_generator.manual_seed(seed)
            peft.inject_adapter_in_model(self._peft_config, model)
        self._parameters: dict[str, Any] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._head: dict[str, Any] = {} if head is None else {"score.weight": head.weight.requires_grad_()}
        self.by_weight = {
            f"{name.removesuffix(_A)}.weight": Adapter(
                a=parameter, b=self._parameters[name.removesuffix(_A) + _B], scale=config.scale
            )
            for name, parameter in self._parameters.items()
            if name.endswith(_A)
        }
        """Adapters by the base model's name of the weight that they change."""
        self.parameters: list[Any] = [*self._parameters.values(), *self._head.values()]
        """All parameters that are trained."""

    def rename(self, name: str) -> str:
        """Return the base model's name of a parameter; empty for a parameter of an adapter."""
        return "" if name in self._parameters else name.replace(".base_layer.", ".")

    @property
    def spec(self) -> AdapterSpec:
        """What an engine must know of the adapters."""
        return AdapterSpec(rank=self.record["rank"], scale=self.record["scale"], base=self.record[_BASE])

    @property
    def peft_parameters(self) -> dict[str, Any]:
        """All parameters that are trained, by PEFT's names; A before B of each layer."""
        named = (self._parameters | self._head).items()
        return {f"base_model.model.{name.replace('.default.', '.')}": parameter for name, parameter in named}

    def write(self, folder: Path) -> None:
        """Write a folder that `peft.PeftModel.from_pretrained` reads, durably. The adapters must be whole here."""
        settings = self._peft_config.to_dict() | {"inference_mode": True}
        if self._head:  # not before: PEFT would put a module of its own in its place
            settings["modules_to_save"] = ["score"]
        tensors = {name: parameter.detach().cpu() for name, parameter in self.peft_parameters.items()}
        store.write_adapter(folder, json.dumps(settings, indent=2, sort_keys=True, default=sorted), tensors)

    def write_record(self, folder: Path) -> None:
        """Write the record that `check_record` compares when a trainer loads the checkpoint, durably."""
        store.write_text(folder / RECORD_FILE, json.dumps(self.record, indent=1))


def check_record(folder: Path, mine: LoraAdapters | None) -> None:
    """Raise WrongState unless a checkpoint's adapters are those of this trainer, or neither has any."""
    path = folder / RECORD_FILE
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise WrongState(f"{path} cannot be read ({error}); restore another checkpoint") from None
    wanted = mine.record if mine else {}
    for key in ("rank", "scale", "layers", _BASE):
        if key == _BASE and found and key not in found:
            _log.warning("Base weights of an older checkpoint not compared. checkpoint=%s", folder)
        elif found.get(key) != wanted.get(key):
            raise WrongState(
                f"{folder} was written {_describe(key, found)}, the trainer runs {_describe(key, wanted)}; start it as "
                f"it was, or begin a new run from an exported model"
            )


def _describe(key: str, record: dict[str, Any]) -> str:
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


@torch.no_grad()
def base_fingerprint(model: nn.Module) -> str:
    """Return the fingerprint of the checkpoint tensors of a model without adapters.

    A collective if the weights are partitioned. Raises WrongState: they cannot be located in the parameters.
    """
    sent = [(parameter, one) for _, parameter, slices in sent_parameters(model) for one in slices]
    samples = [_sample(parameter, one.start + sampled(one.count)) for parameter, one in sent]
    if any(hasattr(parameter, "ds_tensor") for parameter, _ in sent):
        # Each element is on one rank, and 0 on the others. All are sent at once, as integers, which keep -0.0.
        joined = torch.cat([sample.view(torch.int16) for sample in samples]).int()
        torch.distributed.all_reduce(joined)
        parts = torch.split(joined.to(torch.int16), [len(sample) for sample in samples])
        samples = [part.view(torch.bfloat16) for part in parts]
    return fingerprint({one.name: (one.shape, sample) for (_, one), sample in zip(sent, samples, strict=True)})


def _sample(parameter: Any, indices: Tensor) -> Tensor:
    """Return elements of a flattened parameter, bfloat16 [m]; 0 for those that another rank holds."""
    partition = getattr(parameter, "ds_tensor", None)
    if partition is None:
        return parameter.detach().reshape(-1)[indices.to(parameter.device)].bfloat16()  # type: ignore[no-any-return]
    indices = indices - parameter.ds_zero_partition_rank * len(partition)
    mine = (indices >= 0) & (indices < len(partition))
    sample = torch.zeros(len(indices), dtype=torch.bfloat16, device=parameter.device)
    sample[mine.to(sample.device)] = partition[indices[mine].to(partition.device)].to(sample)
    return sample
