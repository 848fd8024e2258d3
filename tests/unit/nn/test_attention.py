"""Tests packed attention against dense attention with a block-diagonal mask: values and gradients on the CPU.

The definition replaces CUDA's kernel, so that the arguments of the kernel are tested.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from fourfold.errors import ConfigError
from fourfold.nn import attention
from fourfold.nn.attention import Segments

HEADS, SIZE = 4, 8
LENGTHS = [7, 1, 30, 3, 29, 1]
CPU = torch.device("cpu")


def segments(lengths: list[int] = LENGTHS) -> Segments:
    return Segments(torch.tensor(lengths), CPU)


def inputs(heads: int, lengths: list[int] = LENGTHS) -> tuple[Tensor, Tensor, Tensor]:
    """Return query [1, h, t, d], key and value [1, g, t, d]."""
    generator = torch.Generator().manual_seed(0)

    def random(count: int) -> Tensor:
        shape = (1, count, sum(lengths), SIZE)
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    return random(HEADS), random(heads), random(heads)


def dense(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], *, window: int, scale: float, softcap: float | None
) -> Tensor:
    """Return [1, t, h, d], by the definition."""
    names = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    positions = torch.arange(sum(lengths))
    back = positions[:, None] - positions
    seen = (names[:, None] == names) & (back >= 0) & (back < window)
    key, value = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    return (torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ value).transpose(1, 2)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 4, 29, 30, 1000])
@pytest.mark.parametrize("heads", [1, 2, HEADS])
def test_packed_equals_dense(heads: int, window: int | None, softcap: float | None) -> None:
    leaves = inputs(heads)
    wanted = dense(*leaves, LENGTHS, window=window or 1000, scale=0.3, softcap=softcap)
    found, weights = attention.attend(
        torch.nn.Module(), *leaves, window, scaling=0.3, softcap=softcap, segments=segments()
    )
    assert weights is None
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
    upstream = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((found * upstream).sum(), leaves)
    torch.testing.assert_close(gradients, torch.autograd.grad((wanted * upstream).sum(), leaves), atol=1e-12, rtol=0)


@pytest.mark.parametrize("lengths", [[1], [5], [1, 1, 1], [64, 2]])
def test_any_number_of_segments(lengths: list[int]) -> None:
    leaves = inputs(2, lengths)
    found, _ = attention.attend(torch.nn.Module(), *leaves, None, segments=segments(lengths))
    wanted = dense(*leaves, lengths, window=1000, scale=SIZE**-0.5, softcap=None)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


def test_segments_of_similar_length_share_a_group_and_every_token_has_its_own_slot() -> None:
    found = segments()
    shapes, slots = found.groups
    assert shapes == [(2, 30), (1, 7), (1, 3), (2, 1)]
    assert len(set(slots.tolist())) == found.token_count == 71
    assert found.positions.tolist() == [i for n in LENGTHS for i in range(n)]
    assert found.offsets.tolist() == [0, 7, 8, 38, 41, 70, 71]
    assert found.offsets.dtype == torch.int32
    padded = sum(count * width for count, width in shapes)
    assert padded <= 4 / 3 * found.token_count


def test_a_layer_without_segments_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear does not pass keyword arguments on to its attention"):
        attention.attend(torch.nn.Linear(1, 1), *inputs(1), None)


# ---- masks ---------------------------------------------------------------------------


@pytest.fixture
def config() -> Any:
    attention.register()
    made = transformers.Gemma3TextConfig(sliding_window=4, num_hidden_layers=2)
    made._attn_implementation = attention.NAME
    return made


def mask(function: str, config: Any, **changes: Any) -> Any:
    arguments = {"attention_mask": None, "past_key_values": None, "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    embeddings = torch.zeros(1, 5, 3)
    return getattr(transformers.masking_utils, function)(config, embeddings, **{**arguments, **changes})


def test_masks_are_windows(config: Any) -> None:
    assert mask("create_causal_mask", config) is None
    assert mask("create_sliding_window_causal_mask", config) == 4


def test_masks_of_another_kind_are_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match="'gemma3_text' has a mask that is neither causal nor a sliding window"):
        mask("create_causal_mask", config, or_mask_function=lambda *_: torch.tensor(True))
    config.attention_chunk_size = 8
    with pytest.raises(ConfigError, match="neither causal nor a sliding window"):
        mask("create_chunked_causal_mask", config)
    config.is_causal = False
    with pytest.raises(ConfigError, match="neither causal nor a sliding window"):
        mask("create_causal_mask", config)


# ---- what the CUDA kernel gets -------------------------------------------------------


class Kernel:
    """Stands in for torch's: the same arguments, by the definition."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def new(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> Tensor:
        assert enable_gqa or query.shape[1] == key.shape[1]
        assert cu_seq_q.dtype == torch.int32 and max_q == max_k == max(LENGTHS)
        assert window_size[1] == 0  # causal
        self.calls.append({"enable_gqa": enable_gqa})
        lengths = torch.diff(cu_seq_q).tolist()
        q, k, v = (x[None].transpose(1, 2) for x in (query, key, value))
        width = window_size[0] + 1 or 1000
        return dense(q, k, v, lengths, window=width, scale=scale or 0.0, softcap=None)[0]

    def old(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        arguments = {"scale": scale, "window_size": window_size, "enable_gqa": True}  # always on
        return self.new(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("version", ["new", "old"])
def test_the_kernel_gets_the_same_segments_and_window(
    monkeypatch: pytest.MonkeyPatch, version: str, window: int | None
) -> None:
    kernel = Kernel()
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", getattr(kernel, version))
    monkeypatch.setattr(attention, "_has_varlen", lambda *_: True)
    attention._varlen_arguments.cache_clear()
    leaves = inputs(2)
    found, _ = attention.attend(torch.nn.Module(), *leaves, window, scaling=0.3, segments=segments())
    attention._varlen_arguments.cache_clear()
    assert [call["enable_gqa"] for call in kernel.calls] == [True]
    wanted = dense(*leaves, LENGTHS, window=window or 1000, scale=0.3, softcap=None)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


class OnCuda(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


def test_the_kernel_is_for_16_bit_on_cuda_and_the_head_sizes_it_has() -> None:
    def has(dtype: torch.dtype, size: int, value_size: int) -> bool:
        query, value = (torch.empty(1, 2, 3, n, dtype=dtype).as_subclass(OnCuda) for n in (size, value_size))
        return attention._has_varlen(query, value)

    assert has(torch.bfloat16, 64, 64) and has(torch.float16, 256, 256)
    assert not has(torch.float32, 64, 64)
    assert not has(torch.bfloat16, 264, 264) and not has(torch.bfloat16, 12, 12) and not has(torch.bfloat16, 64, 32)
    on_cpu = torch.empty(1, 2, 3, 64, dtype=torch.bfloat16)
    assert not attention._has_varlen(on_cpu, on_cpu)


def test_capped_scores_are_refused_on_cuda_by_name() -> None:
    query, key, value = (x.as_subclass(OnCuda) for x in inputs(2))
    with pytest.raises(ConfigError, match=r"Linear caps attention scores at 50\.0, which the CUDA kernel"):
        attention.attend(torch.nn.Linear(1, 1), query, key, value, None, softcap=50.0, segments=segments())
