"""Implements causal attention over packed segments, as an attention implementation of transformers.

    model forward (segments=...) --> every layer's **kwargs --> attend(module, q, k, v, window, segments=...)
        CUDA, 16-bit       torch.nn.attention.varlen: one kernel over the packed row
        everything else    segments of similar length side by side, padded --> scaled_dot_product_attention --> packed

transformers also asks an implementation for its masks and passes them to the layers unread. Here the "mask" is the
width of the layer's sliding window, or None: no [t, t] mask is ever made. The window does not come from the keyword
`sliding_window`, because not every architecture passes it on.

Legend: s segments, t tokens of all of them; h query heads, g key and value heads, d head size;
n segments of a group, w tokens of its longest, p slots of all groups (sum of n * w).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import varlen

from fourfold.errors import ConfigError
from fourfold.nn import sequence
from fourfold.nn.sequence import Exchange, to_device

NAME: Final = "fourfold_packed"
# A segment joins a group whose longest is at most this many times its length, which bounds the padding to a third.
_GROUP_RATIO: Final = 4 / 3
_VARLEN_DTYPES: Final = (torch.float16, torch.bfloat16)
_VARLEN_HEAD_SIZE: Final = 256


class Segments:
    """The places of a packed row's segments on one device; made once per forward pass, used by every layer."""

    def __init__(self, lengths: Tensor, device: torch.device, exchange: Exchange | None = None) -> None:
        """Describe segments that lie one after another.

        Args:
            lengths: [s] integers, each at least 1, on the CPU: reading them from a GPU would wait for it.
            device: of the row.
            exchange: the ranks that share the row, each with an equal slice; None: the row is all here.
        """
        self.exchange = exchange
        self.lengths: list[int] = lengths.tolist()
        self.longest = max(self.lengths)
        self.device = device
        self._ends = lengths.cpu().to(torch.int64).cumsum(0)

    @property
    def token_count(self) -> int:
        """t, the tokens of the row."""
        return int(self._ends[-1])

    @functools.cached_property
    def offsets(self) -> Tensor:
        """Return int32 [s + 1]: the start of each segment, then t."""
        return self._send(functional.pad(self._ends, (1, 0)).to(torch.int32))

    @functools.cached_property
    def positions(self) -> Tensor:
        """Return int64 [t]: the position of each token in its segment, from 0."""
        lengths = torch.tensor(self.lengths)
        starts = (self._ends - lengths).repeat_interleave(lengths)
        return self._send(torch.arange(self.token_count) - starts)

    def _send(self, tensor: Tensor) -> Tensor:
        return to_device(tensor.numpy(), self.device)

    @functools.cached_property
    def groups(self) -> tuple[list[tuple[int, int]], Tensor]:
        """Return (n, w) of each group of segments, and int64 [t]: the slot of each token among all groups' n * w."""
        shapes: list[tuple[int, int]] = []
        first_slots = torch.empty(len(self.lengths), dtype=torch.int64)
        end = 0
        for index in sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i]):
            if not shapes or shapes[-1][1] > _GROUP_RATIO * self.lengths[index]:
                shapes.append((0, self.lengths[index]))
            count, width = shapes[-1]
            shapes[-1] = (count + 1, width)
            first_slots[index] = end
            end += width
        slots = first_slots.repeat_interleave(torch.tensor(self.lengths)).to(self.device)
        return shapes, slots + self.positions


def register() -> None:
    transformers.AttentionInterface.register(NAME, attend)
    transformers.AttentionMaskInterface.register(NAME, _window)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    segments: Segments | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Attend from every token to itself and the tokens before it in its segment.

    Args:
        module: the calling layer.
        query: [1, h, t, d]. If ranks share the row, t is that of a slice, here and in the result.
        key: [1, g, t, d], g a divisor of h.
        value: [1, g, t, d].
        window: number of tokens that a token reads, including itself; None: all. From `_window`.
        scaling: factor of the scores; None: 1 / sqrt(d).
        softcap: scores become softcap * tanh(scores / softcap); None: no cap.
        segments: of the packed row.

    Returns:
        [1, t, h, d], and None for the attention weights.

    Raises:
        ConfigError: the architecture does not pass the segments on, or the device has no kernel for it.
    """
    if segments is None:
        raise ConfigError(
            f"{type(module).__name__} does not pass keyword arguments on to its attention, so samples cannot be packed "
            f"in one row; use another architecture, such as LlamaForCausalLM or Qwen2ForCausalLM"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = None if window is None or window >= segments.longest else window
    if softcap and query.is_cuda:
        raise ConfigError(
            f"{type(module).__name__} caps attention scores at {softcap}, which the CUDA kernel for packed samples "
            f"cannot; use a model without attn_logit_softcapping, or train on the CPU"
        )
    if _has_varlen(query, value):
        kernel = functools.partial(_varlen, segments=segments, scale=scale, window=window)
    else:
        kernel = functools.partial(_grouped, segments=segments, scale=scale, window=window, softcap=softcap)
    rows = [x.transpose(1, 2) for x in (query, key, value)]
    return kernel(*rows) if segments.exchange is None else sequence.attend(segments.exchange, kernel, *rows), None


def _window(*, config: Any, local_size: int | None = None, use_vmap: bool = False, **arguments: Any) -> int | None:
    """Return the number of tokens that a token reads, including itself, or None for all before it.

    transformers calls it with the ingredients of a mask, for which the number stands in.

    Raises ConfigError: the mask is neither causal nor a sliding window.
    """
    sliding = getattr(config, "sliding_window", None)
    both_ways = "allow_is_bidirectional_skip" in arguments
    if use_vmap or both_ways or (local_size is not None and local_size != sliding):
        raise ConfigError(
            f"the architecture {config.model_type!r} has a mask that is neither causal nor a sliding window, so "
            f"samples cannot be packed in one row; use another architecture, such as LlamaForCausalLM or "
            f"Qwen2ForCausalLM"
        )
    return local_size


# ---- CUDA ----------------------------------------------------------------------------


def _has_varlen(query: Tensor, value: Tensor) -> bool:
    size = query.shape[-1]
    fits = size == value.shape[-1] and size <= _VARLEN_HEAD_SIZE and size % 8 == 0
    return query.is_cuda and query.dtype in _VARLEN_DTYPES and fits


@functools.cache
def _varlen_arguments() -> frozenset[str]:
    """Return the names of the kernel's arguments, which differ between versions of torch."""
    return frozenset(inspect.signature(varlen.varlen_attn).parameters)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, *, segments: Segments, scale: float, window: int | None
) -> Tensor:
    """Return [1, t, h, d] from query [1, t, h, d] and key and value [1, t, g, d] of the whole row."""
    arguments: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in _varlen_arguments():  # before torch 2.12 the kernel accepts fewer key heads without it
        arguments["enable_gqa"] = query.shape[2] != key.shape[2]
    kernel: Callable[..., Any] = varlen.varlen_attn
    offsets, longest = segments.offsets, segments.longest
    result: Tensor = kernel(query[0], key[0], value[0], offsets, offsets, longest, longest, **arguments)
    return result[None]


# ---- everywhere ----------------------------------------------------------------------


class _Pad(torch.autograd.Function):
    """[t, ...] -> [p, ...]: each token to its slot, zeros elsewhere. The inverse of `_Pack`.

    Indexing does the same, but its gradient adds row by row, because slots could repeat.
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor, slots: Tensor, slot_count: int) -> Tensor:
        ctx.save_for_backward(slots)
        return packed.new_zeros(slot_count, *packed.shape[1:]).index_copy_(0, slots, packed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        return gradients[0].index_select(0, slots), None, None


class _Pack(torch.autograd.Function):
    """[p, ...] -> [t, ...]: each token from its slot."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.slot_count = len(padded)
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        packed = gradients[0]
        return packed.new_zeros(ctx.slot_count, *packed.shape[1:]).index_copy_(0, slots, packed), None


def _grouped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    segments: Segments,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Return the same as `_varlen`, on every device."""
    shapes, slots = segments.groups
    sizes = [count * width for count, width in shapes]
    padded = [_Pad.apply(x[0], slots, sum(sizes)).split(sizes) for x in (query, key, value)]  # type: ignore[no-untyped-call]
    results = []
    for (count, width), *parts in zip(shapes, *padded, strict=True):
        # Padding follows the tokens of its segment, so under a causal mask none of them reads it.
        q, k, v = (x.view(count, width, *x.shape[1:]).transpose(1, 2) for x in parts)
        mask = None if window is None or window >= width else _window_mask(width, window, query.device)
        if softcap:
            result = _softcapped(q, k, v, mask, scale=scale, softcap=softcap)
        else:
            result = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        results.append(result.transpose(1, 2).flatten(0, 1))
    packed: Tensor = _Pack.apply(torch.cat(results), slots)  # type: ignore[no-untyped-call]
    return packed[None]


def _window_mask(width: int, window: int, device: torch.device) -> Tensor:
    """Return bool [w, w], True where the query (row) reads the key (column)."""
    return torch.ones(width, width, dtype=torch.bool, device=device).tril_().triu_(1 - window)


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float, softcap: float
) -> Tensor:
    """Return [n, h, w, d] from query [n, h, w, d] and key and value [n, g, w, d], with all scores in memory."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    width = query.shape[2]
    mask = _window_mask(width, width, query.device) if mask is None else mask
    scores = torch.tanh(query @ key.transpose(2, 3) * (scale / softcap)) * softcap
    weights = torch.softmax(
        scores.masked_fill(~mask, -torch.inf).to(torch.promote_types(query.dtype, torch.float32)), -1
    )
    return weights.to(query.dtype) @ value
