"""Scores samples (role `reward`) and computes log-probabilities of a frozen model (role `reference`).

The package itself exports the types of reward functions, and imports neither torch nor grpc.
"""

from __future__ import annotations

from fourfold.reward.function import Abstain, Result, RewardFunction, Score, ScoreInput

__version__ = "0.1.0"
__all__ = ["Abstain", "Result", "RewardFunction", "Score", "ScoreInput", "__version__"]
