"""Scores batches with padding and attention masks: encoders, and decoders that `packed.py` cannot pack.

Texts of similar length share a pass. Where the model cannot tell padding from text, each text has a pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from fourfold.arrays import Float32Array, Int32Array, Int64Array
from fourfold.nn.sequence import to_device
from fourfold_reward.models.packed import split_long, start_copy

_PROBE_LENGTHS: Final = (5, 9)
# Largest difference of a score from that of the text alone, relative to their size: absolute, and in ulps.
_PROBE_SHARE: Final = 1e-4
_PROBE_ULPS: Final = 16


class PaddedPasses:
    """The passes of any sequence classifier."""

    def __init__(self, model: Any, *, device: torch.device) -> None:
        """Compare two padded texts with each alone, and batch texts only if their scores agree.

        Args:
            model: a ...ForSequenceClassification in evaluation mode.
            device: of its inputs.
        """
        self._model, self._device = model, device
        text_config = model.config.get_text_config()
        pad_id = text_config.pad_token_id
        if getattr(text_config, "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")  # the default one leaves the softcap out
        self._pad_id: int = 0 if pad_id is None else pad_id
        self._batches = pad_id is not None and self._probe()
        self.kind = "padded" if self._batches else "one text at a time"

    def split(self, lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
        if not self._batches:
            return [[index] for index in range(len(lengths))]
        return split_long(lengths, max_tokens, lambda fitting: _by_length(fitting, max_tokens))

    def start(self, token_ids: Sequence[Int32Array], ends: Sequence[Int64Array] = ()) -> Callable[[], Float32Array]:
        assert not ends, "a process reward model that cannot be packed is refused"
        width = max(map(len, token_ids))
        ids = np.full((len(token_ids), width), self._pad_id, np.int64)
        mask = np.zeros((len(token_ids), width), np.int64)
        for row, each in enumerate(token_ids):
            ids[row, : len(each)] = each
            mask[row, : len(each)] = 1
        arguments = {"input_ids": to_device(ids, self._device)}
        if len(token_ids) > 1:  # a text alone is what transformers computes without a mask
            arguments["attention_mask"] = to_device(mask, self._device)
        with torch.inference_mode():
            logits = self._model(**arguments).logits
        return start_copy(logits[:, 0].float())

    def _probe(self) -> bool:
        """Return whether the scores of padded texts equal those of each text alone."""
        vocabulary = self._model.get_input_embeddings().weight.shape[0]
        count = sum(_PROBE_LENGTHS)
        row = (np.arange(1, count + 1) * max(1, vocabulary // (count + 1)) % vocabulary).astype(np.int32)
        texts = np.split(np.where(row == self._pad_id, (row + 1) % vocabulary, row), np.cumsum(_PROBE_LENGTHS)[:-1])
        alone = np.concatenate([self.start([text])() for text in texts])
        try:
            together = self.start(texts)()
        except (ValueError, TypeError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return False
        allowed = max(_PROBE_ULPS * torch.finfo(self._model.dtype).eps, _PROBE_SHARE)
        return bool(np.abs(together - alone).max() <= allowed * max(1.0, float(np.abs(alone).max())))


def _by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fill passes with the longest texts first, until the padded pass has `max_tokens`."""
    passes: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not room:
            passes.append([])
            room = max_tokens // lengths[index]
        passes[-1].append(index)
        room -= 1
    return passes
