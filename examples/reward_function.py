"""Serves a Python function as a reward service.

    python examples/reward_function.py 127.0.0.1:50053

It needs `fourfold-reward`. A run uses the service when its recipe has `reward.target = "127.0.0.1:50053"`, or when it
has `reward.replicas = 0` and the service registers: pass the coordinator's address as the second argument. To use a
function in a recipe instead, copy examples/rewards/final_answer.py; for a service in another language, copy the calls
of examples/reward_service.py.
"""

from __future__ import annotations

import sys

from fourfold import FourfoldError, Score, ScoreInput, serve_reward

MAX_CHARACTERS = 1000


def reward(sample: ScoreInput) -> Score:
    """Return 1 for an empty completion, and 0 for one of 1000 characters or more."""
    length = len(sample.completion)
    return Score(max(0.0, 1 - length / MAX_CHARACTERS), {"characters": float(length)})


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python examples/reward_function.py HOST:PORT [COORDINATOR_HOST:PORT]")
    try:
        sys.exit(serve_reward(reward, listen=sys.argv[1], coordinator="".join(sys.argv[2:])))
    except FourfoldError as error:
        sys.exit(f"reward_function: {error}")
