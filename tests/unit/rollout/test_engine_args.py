"""CUDA graph sizes: a full batch of samples, with or without a probe, is padded to a size that vLLM captures."""

from __future__ import annotations

from fourfold_rollout.vllm.engine_args import graph_limits


def captured(max_num_seqs: int, largest: int | None) -> list[int]:
    """Return the sizes of whole decode steps that vLLM 0.26 captures (`_set_cudagraph_sizes` and the keys)."""
    largest = largest or min(2 * max_num_seqs, 512)
    sizes = [1, 2, 4, *range(8, min(largest + 1, 256), 8), *(range(256, largest + 1, 16) if largest >= 256 else ())]
    return [size for size in sizes if size <= min(max_num_seqs, largest)]


def padded(batch: int, sizes: list[int]) -> int | None:
    """Return the graph size that a batch is padded to; None: it runs without a graph."""
    return next((size for size in sizes if size >= batch), None)


def test_every_batch_up_to_the_limit_runs_in_a_graph() -> None:
    for samples in range(1, 1500):
        sizes = captured(*graph_limits(samples))
        assert padded(samples, sizes) is not None
        assert padded(samples + 1, sizes) is not None, "with a probe"
        assert graph_limits(samples)[0] < samples + 17
