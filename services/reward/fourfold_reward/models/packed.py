"""Scores packed batches: the texts of a pass lie one after another in one row, without padding.

`PackedPasses` replaces the attention of a decoder by `fourfold.nn.attention`, as the trainer and the reference do, and
calls its body. The head then reads one hidden state of each text, or that at the end of each of its steps. Before, the
hidden states of a few short texts in one row are compared with those of the unchanged model; where they differ, the
model goes to `padded.py`.

Legend: s texts of a pass, t tokens of all of them, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fourfold.arrays import Float32Array, Int32Array, Int64Array
from fourfold.nn import attention
from fourfold.nn.batching import split_by_tokens
from fourfold.nn.scores import scored_rows
from fourfold.nn.sequence import to_device

_PROBE_LENGTHS: Final = (5, 8, 1)
# Largest difference of a hidden state from the model's own, over the mean norm: absolute, and in ulps of the dtype.
_PROBE_SHARE: Final = 1e-4
_PROBE_SHARE_ULPS: Final = 16


class Passes(Protocol):
    """Runs forward passes of a reward model. Use it from one thread."""

    kind: str
    """Description for logs."""

    def split(self, lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
        """Divide texts of these lengths into passes of at most `max_tokens`; a longer text is alone in its pass."""

    def start(self, token_ids: Sequence[Int32Array], ends: Sequence[Int64Array] = ()) -> Callable[[], Float32Array]:
        """Start the pass of some texts, int32 [n] each; return a function that waits for their scores, float32 [s].

        `ends` has the tokens of each text after which a score is read, [k] in total: then the result is float32 [k].
        """


class CannotPack(Exception):
    """The texts of this architecture cannot lie in one row."""


class PlacedSegments(attention.Segments):
    """Segments for a model on several devices. Hooks of accelerate call `to` before a layer of another device."""

    def __init__(self, lengths: Tensor, device: torch.device) -> None:
        super().__init__(lengths, device)
        self._lengths = lengths
        self._others: dict[torch.device, PlacedSegments] = {device: self}

    def to(self, device: Any, non_blocking: bool = False) -> PlacedSegments:
        """Return the same segments on a device; layers of one device share them."""
        place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if place not in self._others:
            self._others[place] = other = PlacedSegments(self._lengths, place)
            other._others = self._others
        return self._others[place]


class PackedPasses:
    """The passes of a decoder whose head is a linear layer named `score`."""

    kind = "packed"

    def __init__(self, model: Any, *, device: torch.device) -> None:
        """Replace the attention of `model`, and compare it with the one before.

        Args:
            model: a ...ForSequenceClassification in evaluation mode.
            device: of its inputs.

        Raises:
            CannotPack: the architecture is another one. The model is as before.
        """
        head = getattr(model, "score", None)
        if not isinstance(head, nn.Linear) or head.out_features != 1 or model.base_model is model:
            raise CannotPack(f"{type(model).__name__} has no linear layer `score` behind a model body")
        self._model, self._body, self._head, self._device = model, model.base_model, head, device
        text_config = model.config.get_text_config()
        self._pad_id: int | None = text_config.pad_token_id
        before = self._body.config._attn_implementation
        try:
            self._probe()
        except Exception as error:  # architectures fail in many ways where they do not pass keywords on
            model.set_attn_implementation(before)
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise CannotPack(f"{type(model).__name__}: {error}") from error

    def split(self, lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
        return split_long(lengths, max_tokens, lambda fitting: split_by_tokens(fitting, max_tokens=max_tokens))

    def start(self, token_ids: Sequence[Int32Array], ends: Sequence[Int64Array] = ()) -> Callable[[], Float32Array]:
        lengths, joined = np.array([len(ids) for ids in token_ids], np.int64), np.concatenate(token_ids)
        if ends:
            starts = np.cumsum(lengths) - lengths
            rows = np.concatenate([start + places for start, places in zip(starts, ends, strict=True)])
        else:
            rows = scored_rows(joined, lengths, self._pad_id)
        with torch.inference_mode():
            hidden = self._hidden(joined, lengths)
            states = hidden.index_select(0, to_device(rows, hidden.device))
            scores = self._score(states)
        return start_copy(scores)

    def _score(self, states: Tensor) -> Tensor:
        """Return float32 [k] from hidden states [k, h]. In bfloat16, the sum would lose small differences."""
        weight, bias = self._head.weight, self._head.bias
        wide = [None if each is None else each.float() for each in (weight, bias)]
        assert wide[0] is not None
        return functional.linear(states.to(weight.device).float(), wide[0], wide[1]).squeeze(1)

    def _hidden(self, token_ids: Int32Array, lengths: Any) -> Tensor:
        """Return the last hidden states [t, h] of texts of `lengths`, int64 [s], which lie one after another."""
        segments = PlacedSegments(torch.from_numpy(lengths), self._device)
        ids = to_device(token_ids, self._device, torch.int64)
        output = self._body(
            input_ids=ids[None], position_ids=segments.positions[None], use_cache=False, segments=segments
        )
        hidden: Tensor = output[0]
        return hidden[0]

    def _probe(self) -> None:
        """Compare the hidden states of short texts in one row with those of each text alone."""
        vocabulary = self._body.get_input_embeddings().weight.shape[0]
        count = sum(_PROBE_LENGTHS)
        # Spread over the vocabulary: the first ids are often special and untrained, and so alike.
        row = (np.arange(1, count + 1) * max(1, vocabulary // (count + 1)) % vocabulary).astype(np.int32)
        with torch.inference_mode():
            self._model.set_attn_implementation("eager")  # the others leave out parts, such as softcaps
            own = []
            for ids in np.split(row, np.cumsum(_PROBE_LENGTHS)[:-1]):
                one = torch.from_numpy(ids).to(self._device, torch.int64)[None]
                own.append(self._body(input_ids=one, use_cache=False)[0][0].float())
            attention.register()
            self._model.set_attn_implementation(attention.NAME)
            if self._body.config._attn_implementation != attention.NAME:
                raise CannotPack("its attention cannot be replaced")
            found = self._hidden(row, np.array(_PROBE_LENGTHS, np.int64)).float()
        expected = torch.cat(own)
        share = float((found - expected).norm(dim=1).max() / expected.norm(dim=1).mean())
        allowed = max(_PROBE_SHARE_ULPS * torch.finfo(self._body.dtype).eps, _PROBE_SHARE)
        if not share <= allowed:
            raise CannotPack(f"its packed hidden states differ by {share:.3g} of their norm")


def split_long(
    lengths: Sequence[int], max_tokens: int, split: Callable[[Sequence[int]], list[list[int]]]
) -> list[list[int]]:
    """Put each text above the limit into a pass of its own, and the others as `split` does."""
    long = [index for index, length in enumerate(lengths) if length > max_tokens]
    fitting = [index for index, length in enumerate(lengths) if length <= max_tokens]
    passes = split([lengths[index] for index in fitting]) if fitting else []
    return [[index] for index in long] + [[fitting[index] for index in each] for each in passes]


def start_copy(scores: Tensor) -> Callable[[], Float32Array]:
    """Start the copy of float32 [s] to the host; return a function that waits for it."""
    if scores.device.type != "cuda":
        return lambda: scores.numpy()
    host = torch.empty_like(scores, device="cpu", pin_memory=True)  # other memory makes the copy synchronous
    host.copy_(scores, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(scores.device))

    def finish() -> Float32Array:
        event.synchronize()
        return host.numpy().copy()

    return finish
