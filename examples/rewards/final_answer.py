"""A reward function to copy: 0.9 for the right final answer, and 0.1 for marking it with "Answer:".

In the recipe:

    [reward]
    function = "examples/rewards/final_answer.py:reward"

It runs in a sandboxed worker process with a time limit: see services/reward/README.md. Return None when a sample
cannot be judged: the sample is then dropped and counted, not scored 0. Errors (an exception, NaN) are counted too.
"""

from __future__ import annotations

from fourfold import Score, ScoreInput


def reward(sample: ScoreInput) -> Score | None:
    """Score one sample. A ScoreInput also has `prompt`, `metadata` and `sample_id`."""
    if not sample.answer:
        return None
    _, marker, final = sample.completion.rpartition("Answer:")
    right = float(final.strip() == sample.answer.strip())
    marked = float(bool(marker))
    return Score(0.9 * right + 0.1 * marked, {"right": right, "marked": marked})
