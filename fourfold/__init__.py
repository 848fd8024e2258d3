"""Post-trains language models with reinforcement learning, as four services and one gRPC contract.

This module is the public API. Import everything from here:

    from fourfold import RolloutClient, SamplingParams, Tokenizer

Each name is loaded when it is first used, so that `import fourfold` takes milliseconds. Names that need an extra or
another distribution raise ImportError with the command that installs it. Everything that is not listed in `__all__` is
internal and may change in any version.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any, Final

__version__: Final = "0.1.0"

# gRPC logs each closed connection on stderr. It reads this variable once, when it is first imported. With INFO it also
# logs why a TLS handshake was refused.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

if TYPE_CHECKING:
    from fourfold.algorithm.advantages import AdvantageEstimator, GroupEstimator, ScoredSamples
    from fourfold.algorithm.losses import LossInputs, PolicyLoss, TokenLoss
    from fourfold.algorithm.packed import PackedRewards
    from fourfold.arrays import Sample, VersionSpan
    from fourfold.coordinator.client import AsyncCoordinatorClient, CoordinatorClient
    from fourfold.coordinator.v1.run_service_pb2 import RunPhase, RunStatus
    from fourfold.errors import (
        AlreadyExists,
        ConfigError,
        DeadlinePassed,
        FourfoldError,
        Internal,
        InvalidInput,
        NotFound,
        Overloaded,
        PeerFault,
        PermissionDenied,
        StaleEpoch,
        Unauthenticated,
        Unavailable,
        WrongState,
    )
    from fourfold.metrics import METRICS
    from fourfold.model.tokenizer import Tokenizer
    from fourfold.reference.client import AsyncReferenceClient, ReferenceClient
    from fourfold.reward.client import AsyncRewardClient, RewardClient
    from fourfold.reward.v1.reward_service_pb2 import SampleError, SampleScore, ScoreItem
    from fourfold.rollout.client import AsyncRolloutClient, Completion, CompletionChunk, RolloutClient
    from fourfold.rollout.v1.rollout_service_pb2 import FinishReason, GenerateRequest, SamplingParams
    from fourfold.trainer.client import AsyncTrainerClient, ForwardBackwardOutput, ForwardOutput, TrainerClient
    from fourfold.trainer.v1.trainer_service_pb2 import (
        OptimStepResponse,
        TrainerPhase,
        TrainerStatus,
        TrainStepResponse,
    )
    from fourfold.types.v1.experience_pb2 import Experience
    from fourfold.weights.local import Publisher
    from fourfold.weights.sender import WeightSender
    from fourfold.weights.source.dense import DenseSource
    from fourfold_reward.sample import Abstain, Score, ScoreInput
    from fourfold_reward.serve import serve_reward

_MODULES: Final[dict[str, tuple[str, ...]]] = {
    "fourfold.rollout.client": ("RolloutClient", "AsyncRolloutClient", "Completion", "CompletionChunk"),
    "fourfold.rollout.v1.rollout_service_pb2": ("SamplingParams", "GenerateRequest", "FinishReason"),
    "fourfold.trainer.client": ("TrainerClient", "AsyncTrainerClient", "ForwardOutput", "ForwardBackwardOutput"),
    "fourfold.trainer.v1.trainer_service_pb2": (
        "TrainerStatus",
        "TrainerPhase",
        "TrainStepResponse",
        "OptimStepResponse",
    ),
    "fourfold.reward.client": ("RewardClient", "AsyncRewardClient"),
    "fourfold.reward.v1.reward_service_pb2": ("ScoreItem", "SampleScore", "SampleError"),
    "fourfold_reward.serve": ("serve_reward",),
    "fourfold_reward.sample": ("Score", "ScoreInput", "Abstain"),
    "fourfold.reference.client": ("ReferenceClient", "AsyncReferenceClient"),
    "fourfold.coordinator.client": ("CoordinatorClient", "AsyncCoordinatorClient"),
    "fourfold.coordinator.v1.run_service_pb2": ("RunStatus", "RunPhase"),
    "fourfold.types.v1.experience_pb2": ("Experience",),
    "fourfold.arrays": ("Sample", "VersionSpan"),
    "fourfold.model.tokenizer": ("Tokenizer",),
    "fourfold.algorithm.losses": ("PolicyLoss", "LossInputs", "TokenLoss"),
    "fourfold.algorithm.advantages": ("AdvantageEstimator", "GroupEstimator", "ScoredSamples"),
    "fourfold.algorithm.packed": ("PackedRewards",),
    "fourfold.metrics": ("METRICS",),
    "fourfold.weights.local": ("Publisher",),
    "fourfold.weights.sender": ("WeightSender",),
    "fourfold.weights.source.dense": ("DenseSource",),
    "fourfold.errors": (
        "FourfoldError",
        "ConfigError",
        "InvalidInput",
        "Unauthenticated",
        "PermissionDenied",
        "NotFound",
        "StaleEpoch",
        "AlreadyExists",
        "WrongState",
        "Overloaded",
        "Unavailable",
        "DeadlinePassed",
        "Internal",
        "PeerFault",
    ),
}
_MODULE_OF: Final = {name: module for module, names in _MODULES.items() for name in names}
# The requirement that provides a module which is not there.
_REQUIREMENTS: Final = {
    "fourfold_reward": "fourfold-reward",
    "tokenizers": "fourfold[tokenizer]",
    "torch": "fourfold[torch]",
}

__all__ = [
    "RolloutClient",
    "AsyncRolloutClient",
    "Completion",
    "CompletionChunk",
    "SamplingParams",
    "GenerateRequest",
    "FinishReason",
    "TrainerClient",
    "AsyncTrainerClient",
    "ForwardOutput",
    "ForwardBackwardOutput",
    "TrainerStatus",
    "TrainerPhase",
    "TrainStepResponse",
    "OptimStepResponse",
    "RewardClient",
    "AsyncRewardClient",
    "ScoreItem",
    "SampleScore",
    "SampleError",
    "serve_reward",
    "Score",
    "ScoreInput",
    "Abstain",
    "ReferenceClient",
    "AsyncReferenceClient",
    "CoordinatorClient",
    "AsyncCoordinatorClient",
    "RunStatus",
    "RunPhase",
    "Experience",
    "Sample",
    "VersionSpan",
    "Tokenizer",
    "PolicyLoss",
    "LossInputs",
    "TokenLoss",
    "AdvantageEstimator",
    "GroupEstimator",
    "ScoredSamples",
    "PackedRewards",
    "METRICS",
    "Publisher",
    "WeightSender",
    "DenseSource",
    "FourfoldError",
    "ConfigError",
    "InvalidInput",
    "Unauthenticated",
    "PermissionDenied",
    "NotFound",
    "StaleEpoch",
    "AlreadyExists",
    "WrongState",
    "Overloaded",
    "Unavailable",
    "DeadlinePassed",
    "Internal",
    "PeerFault",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Load a public name (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fourfold' has no attribute {name!r}; public names are in fourfold.__all__")
    try:
        module = importlib.import_module(_MODULE_OF[name])
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _REQUIREMENTS:
            raise
        raise ImportError(f"fourfold.{name} needs {package}; run `pip install '{_REQUIREMENTS[package]}'`") from error
    value = getattr(module, name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
