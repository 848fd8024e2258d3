"""Loads a causal language model for training, and applies faster layers: ZeRO-3 leaf modules, Liger kernels.

No rank holds more than its part of the model. transformers builds the model from the headers of the files, with
parameters on the meta device, which have no memory; then each is replaced by one whose elements on this rank are read
from the files (`partition.Placement`).
"""

from __future__ import annotations

import importlib.util
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn
from transformers.models.auto import auto_factory

from fourfold.config import Config
from fourfold.errors import ConfigError, WrongState
from fourfold.install import install_command
from fourfold.nn import forward
from fourfold.weights.source.fused_params import ParameterSlice, checkpoint_slices
from fourfold_trainer.checkpoint.tensor_files import ModelFiles, read_shard
from fourfold_trainer.zero.partition import Placement, WholePlacement, Zero3Placement

# Elements of two tied tensors that are compared at once.
_COMPARED: Final = 1 << 22

_log = logging.getLogger(__name__)


def load_model(config: Config, folder: Path, device: torch.device) -> Any:
    """Return the model of a folder in training mode: this rank's partitions at ZeRO stage 3, else whole on `device`.

    Not a collective. Raises ConfigError if the model cannot be trained with this recipe.
    """
    place = Zero3Placement(config, device) if config.trainer.zero_stage == 3 else WholePlacement(device)
    with ModelFiles(folder) as files:
        model = build_from_headers(config, files)
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if longest is not None and config.model.max_context_tokens > longest:
            raise ConfigError(
                f"model.max_context_tokens = {config.model.max_context_tokens}, but {folder} was made for at most "
                f"{longest} tokens; lower it"
            )
        read_weights(model, files, place)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    forward.disable_dropout(model)
    if config.trainer.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    if config.trainer.gradient_checkpointing or config.trainer.zero_stage == 3:
        # If only adapters are trained, the inputs of the first layer need no gradient. Gradient checkpoints then return
        # none, and ZeRO-3, which waits for the gradient of the inputs, releases the layer before its backward pass.
        model.enable_input_require_grads()
    return model.train()


class _OnDisk:
    """A tensor as transformers takes it from a file that it has not read: with no element, on the meta device."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def __getitem__(self, _: Any) -> _OnDisk:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(self.shape, dtype=dtype or self.dtype, device="meta")


def build_from_headers(config: Config, files: ModelFiles) -> Any:
    """Return a model whose parameters are on the meta device, except those that the files lack.

    transformers initializes these at random, here the same on all ranks and for every number of ranks.
    """
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = files.folder
    state = {name: _OnDisk(entry.shape, files.dtype(name)) for name, entry in files.entries.items()}
    try:
        settings: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        _check_plain(folder, settings)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.seed)
            dtype = getattr(torch, config.model.dtype)
            make: Any = _model_class(settings)
            if settings.sub_configs.get("text_config") is make.config_class:
                settings = settings.get_text_config()
            model: Any = make.from_pretrained(None, config=settings, state_dict=state, dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"model.source: {folder} cannot be loaded as a causal language model ({error}); give a Hugging Face "
            f"folder with config.json and safetensors weights"
        ) from None
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def _model_class(settings: Any) -> Any:
    """Return the class that transformers.AutoModelForCausalLM would make, which takes no state without a folder."""
    choose: Any = auto_factory._get_model_class
    return choose(settings, transformers.MODEL_FOR_CAUSAL_LM_MAPPING)


def _check_plain(folder: Path, settings: Any) -> None:
    """Raise ConfigError for a folder whose files are not all that the model consists of."""
    for there, what in (
        (getattr(settings, "quantization_config", None), "quantized weights (quantization_config in config.json)"),
        ((folder / "adapter_config.json").exists(), "an adapter (adapter_config.json)"),
    ):
        if there:
            raise ConfigError(f"model.source: {folder} has {what}; give a folder with plain, merged weights")


def read_weights(model: Any, files: ModelFiles, placement: Placement) -> None:
    """Replace the parameters of a model from `build_from_headers` by those of this rank, read from the files.

    At any time only this rank's part and one parameter that the files lack are in memory. Raises ConfigError: the files
    hold a parameter in a way that cannot be read in parts.
    """
    slices = _locate(model, files)
    _tie(model, files, slices)
    owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            owners[id(parameter)].append((module, key))
    for name, parameter in list(model.named_parameters()):
        found = placement.place(tuple(parameter.shape), parameter.dtype, _filler(files, parameter, slices.get(name)))
        for module, key in owners[id(parameter)]:
            module._parameters[key] = found
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            module_name, _, key = name.rpartition(".")
            whole = torch.empty(buffer.shape, dtype=buffer.dtype)
            read_shard(files, slices[name], 0, whole.view(-1))
            model.get_submodule(module_name)._buffers[key] = whole


def _filler(files: ModelFiles, parameter: Tensor, slices: Sequence[ParameterSlice] | None) -> Any:
    """Return the `Fill` of a parameter in the files, or of one that they lack and that is whole in memory."""

    def fill(target: Tensor, first: int) -> None:
        if slices is None:
            target.copy_(parameter.detach().reshape(-1)[first : first + len(target)])
        else:
            read_shard(files, slices, first, target)

    return fill


def _locate(model: Any, files: ModelFiles) -> dict[str, tuple[ParameterSlice, ...]]:
    """Return the tensors in the files of each parameter and buffer that is on the meta device, under their names."""
    state = [*model.named_parameters(), *model.named_buffers()]
    shapes = {name: tuple(tensor.shape) for name, tensor in state if tensor.is_meta}
    try:
        slices = checkpoint_slices(model, shapes)
    except WrongState as error:
        raise ConfigError(f"model.source: {files.folder} cannot be read in parts: {error.message}") from None
    return {name: tuple(_named_as_stored(model, files, one) for one in ones) for name, ones in slices.items()}


def _named_as_stored(model: Any, files: ModelFiles, one: ParameterSlice) -> ParameterSlice:
    """Return a slice of a parameter by its name in the files, which may hold the model without its head."""
    prefix = f"{model.base_model_prefix}."
    for name in (one.name, one.name.removeprefix(prefix), prefix + one.name):
        entry = files.entries.get(name)
        if entry is not None and entry.shape == one.shape:
            return ParameterSlice(name=name, start=one.start, shape=one.shape)
    raise ConfigError(
        f"model.source: {files.folder} has no tensor {one.name} {one.shape}, under which this version of transformers "
        f"stores it; load the model and write it again with save_pretrained"
    )


def _tie(model: Any, files: ModelFiles, slices: dict[str, tuple[ParameterSlice, ...]]) -> None:
    """Tie two parameters that config.json calls tied, if the files hold both and they are equal.

    transformers does so for tensors in memory, and ignores those on the meta device.
    """
    for target, source in list(model.all_tied_weights_keys.items()):
        tied, own = model.get_parameter(target), model.get_parameter(source)
        if tied is own:
            continue
        module_name, _, key = target.rpartition(".")
        if tied.shape == own.shape and _are_equal(files, slices[target], slices[source], tied.numel()):
            setattr(model.get_submodule(module_name), key, own)
        else:
            model.all_tied_weights_keys.pop(target)
            _log.warning("Tied weights differ in the files and are not tied. folder=%s weight=%s", files.folder, target)


def _are_equal(files: ModelFiles, one: Sequence[ParameterSlice], other: Sequence[ParameterSlice], count: int) -> bool:
    def parts(slices: Sequence[ParameterSlice]) -> Iterator[Tensor]:
        for first in range(0, count, _COMPARED):
            part = torch.empty(min(_COMPARED, count - first), dtype=torch.float32)
            read_shard(files, slices, first, part)
            yield part

    return all(torch.equal(a, b) for a, b in zip(parts(one), parts(other), strict=True))


def speed_up(config: Config, model: Any) -> None:
    """Make the layers of a model faster, in place. Raises ConfigError if the recipe's kernels are not available."""
    if config.trainer.zero_stage == 3:
        # Gather each decoder layer as a whole: the hooks of its dozen modules cost more than their communication.
        names = [name for name in model._no_split_modules or () if name in {type(m).__name__ for m in model.modules()}]
        if names:
            set_z3_leaf_modules(model, names)
    if config.trainer.liger_kernels:
        apply_liger(model)


def apply_liger(model: Any) -> None:
    """Replace layers by Liger's kernels, in place. Raises ConfigError if there are none for the architecture."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError(
            f"trainer.liger_kernels is on, but liger-kernel is not installed; "
            f"{install_command('liger-kernel')}, or switch it off"
        )
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"trainer.liger_kernels is on, but Liger has none for model type {kind!r}; switch it off")
    # Not Liger's losses: fourfold/nn/logprobs.py computes the log-probabilities.
    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
