"""Loads a reward model onto its devices, straight from the safetensors files and in its dtype.

A model on several GPUs is split by layers: each GPU has a run of them, and hooks of accelerate move the states.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any, Final

import torch
import transformers
from torch import nn

from fourfold.config.reward import RewardModelConfig
from fourfold.errors import ConfigError
from fourfold.install import install_command
from fourfold.model.classifier import ClassifierFolder
from fourfold_reward.models import fused
from fourfold_reward.models.packed import CannotPack, PackedPasses, Passes
from fourfold_reward.models.padded import PaddedPasses

_log = logging.getLogger(__name__)
_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_passes(folder: ClassifierFolder, table: RewardModelConfig) -> tuple[Passes, int]:
    """Load a model; return its passes and the size of its vocabulary. Blocks for as long as it takes to read it.

    Raises:
        ConfigError: no such device, too few GPUs, too little memory, or weights that do not belong to config.json.
    """
    check_devices(table)
    model = _load(folder, table)
    device = next(model.get_input_embeddings().parameters()).device
    vocabulary_size = int(model.get_input_embeddings().weight.shape[0])
    try:
        passes: Passes = PackedPasses(model, device=device)
        replaced = fused.fuse(model) if device.type == "cuda" else 0
    except CannotPack as error:
        if table.kind == "process":
            raise ConfigError(
                f"{folder.path}: {error}; a process reward model is a decoder such as Qwen2ForTokenClassification"
            ) from None
        _log.warning("texts are padded, because the model cannot pack them: %s", error)
        passes, replaced = PaddedPasses(model, device=device), 0
    _log.info("reward model loaded: passes=%s device=%s fused_modules=%d", passes.kind, device, replaced)
    return passes, vocabulary_size


def check_devices(table: RewardModelConfig) -> None:
    """Check that this process sees the GPUs that the model needs; ConfigError otherwise."""
    gpus = table.gpus_per_replica
    if table.device == "cpu":
        if gpus > 1:
            raise ConfigError(
                f"reward.model.gpus_per_replica = {gpus} with device = 'cpu'; set device = 'cuda', or remove it"
            )
        return
    if not torch.cuda.is_available():
        raise ConfigError(
            "reward.model.device = 'cuda', but torch sees no GPU; set it to 'cpu', or start the service on a GPU"
        )
    if (count := torch.cuda.device_count()) < gpus:
        raise ConfigError(f"reward.model.gpus_per_replica = {gpus}, and this process sees {count} GPUs; lower it")


def _load(folder: ClassifierFolder, table: RewardModelConfig) -> Any:
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    place = _device_map(table)
    classes = {
        "score": transformers.AutoModelForSequenceClassification,
        "process": transformers.AutoModelForTokenClassification,
    }
    try:
        model, report = classes[table.kind].from_pretrained(
            folder.path,
            dtype=_DTYPES[table.dtype],
            num_labels=folder.labels,
            device_map=place,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"reward.model.source = {str(folder.path)!r}: its {folder.parameter_count / 1e9:.1f}B parameters in "
            f"{table.dtype} do not fit on {table.gpus_per_replica} GPU; raise reward.model.gpus_per_replica"
        ) from None
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ConfigError(f"{folder.path}: cannot be read as a classifier: {error}") from None
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"{folder.path}: its files lack {missing[0]} and {len(missing) - 1} more tensors of a "
            f"{type(model).__name__}, which would be random; save the whole reward model with save_pretrained"
        )
    if table.kind == "process":
        _merge_labels(model)
    model.requires_grad_(False)
    model.eval()
    if place is None:
        model.to("cuda:0" if table.device == "cuda" else "cpu")
    if table.gpus_per_replica > 1:
        _check_split(folder, model, table)
    return model


def _merge_labels(model: Any) -> None:
    """Replace a head of the labels wrong and right by their log-odds, the difference of the two."""
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 2:
        return
    one = nn.Linear(head.in_features, 1, bias=head.bias is not None, device=head.weight.device, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            wide = getattr(head, name).float()
            parameter.copy_(wide[1:] - wide[:1])
    model.score = one


def _device_map(table: RewardModelConfig) -> Any:
    """Return the device_map of transformers; None: load into main memory, then move."""
    if importlib.util.find_spec("accelerate") is None:
        if table.gpus_per_replica > 1:
            raise ConfigError(
                f"reward.model.gpus_per_replica = {table.gpus_per_replica} needs the package accelerate: "
                f"{install_command('fourfold-reward[models]')}"
            )
        return None
    if table.gpus_per_replica > 1:
        return "balanced"
    return {"": torch.device("cuda", 0) if table.device == "cuda" else torch.device("cpu")}


def _check_split(folder: ClassifierFolder, model: Any, table: RewardModelConfig) -> None:
    """Check that all layers are on GPUs; ConfigError otherwise."""
    places = [str(place) for place in getattr(model, "hf_device_map", {}).values()]
    counts = {place: places.count(place) for place in sorted(set(places))}
    if elsewhere := {"cpu", "disk"} & counts.keys():
        raise ConfigError(
            f"reward.model.source = {str(folder.path)!r}: its {folder.parameter_count / 1e9:.1f}B parameters in "
            f"{table.dtype} do not fit on {table.gpus_per_replica} GPUs, and parts would be on {min(elsewhere)}; raise "
            f"reward.model.gpus_per_replica"
        )
    _log.info("reward model split: modules=%s", counts)
