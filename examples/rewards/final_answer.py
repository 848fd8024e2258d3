"""A reward function to copy: 1 for the right final answer, a little for saying which line it is.

In the recipe:

    [reward]
    verifier = "examples/rewards/final_answer.py:reward"

It runs in a worker process with a time limit and few rights: see services/reward/README.md.
Return None when a sample cannot be judged: it is then dropped and counted, not scored 0. What
goes wrong (an exception, NaN) is counted, too.
"""

from __future__ import annotations

from fourfold_reward import Score, ScoreInput


def reward(sample: ScoreInput) -> Score | None:
    """Score one sample. Besides `completion` and `answer` it has `prompt`, `metadata` and `sample_id`."""
    if not sample.answer:
        return None
    _, marker, final = sample.completion.rpartition("Answer:")
    right = float(final.strip() == sample.answer.strip())
    marked = float(bool(marker))
    return Score(0.9 * right + 0.1 * marked, {"right": right, "marked": marked})
