"""Exports a model of DeepSpeed as a Hugging Face folder, some parameters at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import deepspeed

from fourfold.errors import Unavailable
from fourfold.weights.source.fused_params import SentParameter, sent_parameters, whole_shape
from fourfold.weights.source.lora import merged
from fourfold.weights.source.zero3 import gathering
from fourfold_trainer.checkpoint import model_export
from fourfold_trainer.zero.lora import LoraAdapters

# Elements that are gathered at once: 1 GiB in float32 on each rank.
_GATHER_ELEMENTS: Final = 1 << 28
# Folder inside an export that holds the LoRA adapters alone.
_ADAPTER_FOLDER: Final = "adapter"


def export_model(
    engine: Any, folder: Path, *, source: Path, stage: int, rank: int, adapters: LoraAdapters | None = None
) -> None:
    """Gather some parameters at a time; rank 0 writes them before the next ones are gathered. A collective.

    Args:
        engine: of DeepSpeed, with the model.
        folder: an existing one.
        source: folder that the model came from, for its tokenizer.
        stage: of ZeRO.
        rank: of this process.
        adapters: of the model, which are merged into the weights, and written alone, too.

    Raises Unavailable when the disk refuses.
    """
    model = engine.module
    ignored = model._keys_to_ignore_on_save or ()
    rename = adapters.rename if adapters is not None else None
    sent = [one for one in sent_parameters(model, rename) if one[0] not in ignored]
    specs = {one.name: (p.dtype, one.shape) for _, p, slices in sent for one in slices}
    failure: Unavailable | None = None  # of rank 0, which gathers on: the others would wait for it
    writer = model_export.WeightsWriter(folder, specs) if rank == 0 else None

    def gathered(parameters: list[Any]) -> AbstractContextManager[Any]:
        whole: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters)
        return whole if stage == 3 and parameters else nullcontext()

    # ZeRO-3 prefetches parameters, and some are still in flight after a pass without gradients. GatheredParameters
    # then fails with "Cannot partition a param in flight"; `gathering` waits for them first.
    with gathering(engine) if stage == 3 else nullcontext():
        # Every group needs the adapters, which are small: gather them once around all groups.
        with gathered(adapters.parameters if adapters is not None else []):
            for group in _groups(sent):
                with gathered([parameter for _, parameter, _ in group]):
                    if writer is not None and failure is None:
                        failure = _write(writer, group, adapters)
            if rank == 0 and adapters is not None and failure is None:
                adapters.write(folder / _ADAPTER_FOLDER)
    if writer is not None:
        writer.close()
        if failure is not None:
            raise failure
        writer.finish()
        model_export.write_companions(model, folder, source=source, settings=_classifier_settings(model, source))


def _classifier_settings(model: Any, source: Path) -> dict[str, Any]:
    """Return what config.json has in addition if the model is a critic: that of a classifier with one label.

    transformers reads its folder as a ...ForSequenceClassification, and `critic.source` takes it.
    """
    if not hasattr(model, "score"):
        return {}
    name = type(model).__name__.replace("ForCausalLM", "ForSequenceClassification")
    pad = model_export.pad_token_id(model.config.get_text_config(), source)
    labels = {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    return {"architectures": [name], **labels, **({} if pad is None else {"pad_token_id": pad})}


def _write(
    writer: model_export.WeightsWriter, group: Sequence[SentParameter], adapters: LoraAdapters | None
) -> Unavailable | None:
    """Write parameters that are whole on this rank, merged with their LoRA adapters; return the disk's error."""
    try:
        for name, parameter, slices in group:
            flat = parameter.detach().reshape(-1)
            if adapters is not None and (adapter := adapters.by_weight.get(name)) is not None:
                flat = merged(flat, adapter)
            for one in slices:
                writer.write(one.name, flat[one.start : one.start + one.count])
    except Unavailable as error:
        return error
    return None


def _groups(sent: Sequence[SentParameter]) -> Iterator[list[SentParameter]]:
    """Yield parameters in groups of at most _GATHER_ELEMENTS, or one parameter that is larger."""
    group: list[SentParameter] = []
    size = 0
    for one in sent:
        count = math.prod(whole_shape(one[1]))
        if group and size + count > _GATHER_ELEMENTS:
            yield group
            group, size = [], 0
        group.append(one)
        size += count
    yield group
