"""Scores samples (role `reward`) and serves log-probabilities of a frozen model (role `reference`).

What a reward function needs is here; importing it brings neither torch nor grpc:

    from fourfold_reward import Abstain, Score, ScoreInput

    def reward(sample: ScoreInput) -> float | Score | Abstain | None: ...
"""

from __future__ import annotations

from typing import Final

from fourfold_reward.sample import Abstain, Result, RewardFunction, Score, ScoreInput

__version__: Final = "0.1.0"
__all__ = ["Abstain", "Result", "RewardFunction", "Score", "ScoreInput", "__version__"]
