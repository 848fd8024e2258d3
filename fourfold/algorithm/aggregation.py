"""Computes the weight of each token in the loss. numpy float64, over the whole optimizer step.

    B        samples of the step, over all ranks and micro-batches. A trajectory of several segments is one sample: its
             n_i are the tokens of all segments, so that splitting it changes no weight
    n_i      action tokens of sample i, may be 0
    N        sum of n_i
    B'       samples with n_i > 0
    lengths  [B]  n_i

The loss is the sum of c_i * loss_t over all tokens. N and B' are known before the first backward pass, so the gradient
does not depend on how the step is split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, assert_never

if TYPE_CHECKING:
    from fourfold.arrays import Float64Array, Int64Array

Mode = Literal["token-mean", "sequence-mean", "sequence-sum", "constant-length", "token-sum"]

FORMULAS: Final[dict[Mode, str]] = {
    "token-mean": "{term} summed over all sampled tokens / their number: every token weighs the same",
    "sequence-mean": "{term} averaged over the tokens of each sample, then over samples: every sample weighs the same",
    "sequence-sum": "{term} summed over the tokens of each sample, averaged over samples",
    "constant-length": "{term} summed over the tokens of each sample / {length:,} (sampling.max_new_tokens), averaged "
    "over samples",
    "token-sum": "{term} summed over all sampled tokens, without a divisor: its size grows with the batch",
}


def sample_weights(lengths: Int64Array, *, mode: Mode, constant_length: int) -> Float64Array:
    """Return the weight c of every token of each sample, float64 [B]; 0 for a sample without tokens.

        token-mean       1 / N          every token equal: DAPO, arXiv 2503.14476, eq. 8
        sequence-mean    1 / (n_i B')   every sample equal: GRPO, arXiv 2402.03300, eq. 3; GSPO, arXiv 2507.18071, eq. 5
        sequence-sum     1 / B'         long samples count more, by their length: RLOO, arXiv 2402.14740
        constant-length  1 / (L B')     the same with a fixed scale: Dr. GRPO, arXiv 2503.20783
        token-sum        1              no scale at all: choose a learning rate for it

    L is `constant_length`, at least 1; it must not depend on the batch.
    """
    alive = lengths > 0
    weights = 0.0 * lengths.astype(float)
    if not alive.any():
        return weights
    sample_count = int(alive.sum())
    match mode:
        case "token-mean":
            weights[alive] = 1 / lengths.sum()
        case "sequence-mean":
            weights[alive] = 1 / (lengths[alive] * sample_count)
        case "sequence-sum":
            weights[alive] = 1 / sample_count
        case "constant-length":
            weights[alive] = 1 / (constant_length * sample_count)
        case "token-sum":
            weights[alive] = 1.0
        case _:
            assert_never(mode)
    return weights
