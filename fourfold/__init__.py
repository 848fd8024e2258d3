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

if TYPE_CHECKING:  # `as` marks a name as exported, for type checkers
    from pathlib import Path

    from fourfold.agent.client import AgentClient as AgentClient
    from fourfold.agent.client import AsyncAgentClient as AsyncAgentClient
    from fourfold.agent.v1.agent_service_pb2 import Message as Message
    from fourfold.agent.v1.agent_service_pb2 import Tool as Tool
    from fourfold.algorithm.advantages import AdvantageEstimator as AdvantageEstimator
    from fourfold.algorithm.advantages import GroupEstimator as GroupEstimator
    from fourfold.algorithm.advantages import ScoredSamples as ScoredSamples
    from fourfold.algorithm.losses import LossInputs as LossInputs
    from fourfold.algorithm.losses import PolicyLoss as PolicyLoss
    from fourfold.algorithm.losses import SampleInputs as SampleInputs
    from fourfold.algorithm.losses import SampleLoss as SampleLoss
    from fourfold.algorithm.losses import TokenLoss as TokenLoss
    from fourfold.algorithm.losses import UnitLoss as UnitLoss
    from fourfold.algorithm.packed import PackedRewards as PackedRewards
    from fourfold.coordinator.client import AsyncCoordinatorClient as AsyncCoordinatorClient
    from fourfold.coordinator.client import AsyncScorerClient as AsyncScorerClient
    from fourfold.coordinator.client import CoordinatorClient as CoordinatorClient
    from fourfold.coordinator.client import ScorerClient as ScorerClient
    from fourfold.coordinator.v1.run_service_pb2 import RunPhase as RunPhase
    from fourfold.coordinator.v1.run_service_pb2 import RunStatus as RunStatus
    from fourfold.errors import AlreadyExists as AlreadyExists
    from fourfold.errors import ConfigError as ConfigError
    from fourfold.errors import DeadlinePassed as DeadlinePassed
    from fourfold.errors import FourfoldError as FourfoldError
    from fourfold.errors import Internal as Internal
    from fourfold.errors import InvalidInput as InvalidInput
    from fourfold.errors import NotFound as NotFound
    from fourfold.errors import Overloaded as Overloaded
    from fourfold.errors import PeerFault as PeerFault
    from fourfold.errors import PermissionDenied as PermissionDenied
    from fourfold.errors import StaleEpoch as StaleEpoch
    from fourfold.errors import Unauthenticated as Unauthenticated
    from fourfold.errors import Unavailable as Unavailable
    from fourfold.errors import WrongState as WrongState
    from fourfold.metrics import METRICS as METRICS
    from fourfold.model.tokenizer import Tokenizer as Tokenizer
    from fourfold.reference.client import AsyncReferenceClient as AsyncReferenceClient
    from fourfold.reference.client import ReferenceClient as ReferenceClient
    from fourfold.reward.client import AsyncRewardClient as AsyncRewardClient
    from fourfold.reward.client import RewardClient as RewardClient
    from fourfold.reward.function import Abstain as Abstain
    from fourfold.reward.function import RewardFunction
    from fourfold.reward.function import Score as Score
    from fourfold.reward.function import ScoreInput as ScoreInput
    from fourfold.reward.v1.reward_service_pb2 import SampleError as SampleError
    from fourfold.reward.v1.reward_service_pb2 import SampleScore as SampleScore
    from fourfold.reward.v1.reward_service_pb2 import ScoreItem as ScoreItem
    from fourfold.rollout.client import AsyncRolloutClient as AsyncRolloutClient
    from fourfold.rollout.client import Completion as Completion
    from fourfold.rollout.client import CompletionChunk as CompletionChunk
    from fourfold.rollout.client import RolloutClient as RolloutClient
    from fourfold.rollout.v1.rollout_service_pb2 import FinishReason as FinishReason
    from fourfold.rollout.v1.rollout_service_pb2 import GenerateRequest as GenerateRequest
    from fourfold.rollout.v1.rollout_service_pb2 import SamplingParams as SamplingParams
    from fourfold.sample import Sample as Sample
    from fourfold.sample import VersionSpan as VersionSpan
    from fourfold.trainer.client import AsyncTrainerClient as AsyncTrainerClient
    from fourfold.trainer.client import ForwardBackwardOutput as ForwardBackwardOutput
    from fourfold.trainer.client import ForwardOutput as ForwardOutput
    from fourfold.trainer.client import TrainerClient as TrainerClient
    from fourfold.trainer.v1.trainer_service_pb2 import OptimStepResponse as OptimStepResponse
    from fourfold.trainer.v1.trainer_service_pb2 import TrainerPhase as TrainerPhase
    from fourfold.trainer.v1.trainer_service_pb2 import TrainerStatus as TrainerStatus
    from fourfold.trainer.v1.trainer_service_pb2 import TrainStepResponse as TrainStepResponse
    from fourfold.types.v1.experience_pb2 import Experience as Experience
    from fourfold.weights.local import Publisher as Publisher
    from fourfold.weights.sender import WeightSender as WeightSender
    from fourfold.weights.source.dense import DenseSource as DenseSource

    def serve_reward(  # as fourfold_reward.serve has it
        function: RewardFunction,
        *,
        listen: str = ...,
        coordinator: str = ...,
        member: str = ...,
        scorer: str = ...,
        certs: str | Path = ...,
        advertise: str = ...,
        processes: int = ...,
        timeout_seconds: float = ...,
        network: bool = ...,
        environment: tuple[str, ...] = ...,
        memory_gib: int = ...,
        metrics_listen: str = ...,
        tracing_endpoint: str = ...,
    ) -> int: ...


_MODULES: Final[dict[str, tuple[str, ...]]] = {
    "fourfold.agent.client": ("AgentClient", "AsyncAgentClient"),
    "fourfold.agent.v1.agent_service_pb2": ("Message", "Tool"),
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
    "fourfold.reward.function": ("Score", "ScoreInput", "Abstain"),
    "fourfold.reference.client": ("ReferenceClient", "AsyncReferenceClient"),
    "fourfold.coordinator.client": ("CoordinatorClient", "AsyncCoordinatorClient", "ScorerClient", "AsyncScorerClient"),
    "fourfold.coordinator.v1.run_service_pb2": ("RunStatus", "RunPhase"),
    "fourfold.types.v1.experience_pb2": ("Experience",),
    "fourfold.sample": ("Sample", "VersionSpan"),
    "fourfold.model.tokenizer": ("Tokenizer",),
    "fourfold.algorithm.losses": ("PolicyLoss", "LossInputs", "TokenLoss", "SampleLoss", "SampleInputs", "UnitLoss"),
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
# Functions of services, and the distributions that register them by entry points of the group `fourfold.functions`.
_FUNCTIONS: Final = {"serve_reward": "fourfold-reward"}
# The requirement that provides a module which is not there.
_REQUIREMENTS: Final = {
    "tokenizers": "fourfold[tokenizer]",
    "torch": "fourfold[torch]",
}

__all__ = [*_MODULE_OF, *_FUNCTIONS, "__version__"]


def __getattr__(name: str) -> Any:
    """Load a public name (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'fourfold' has no attribute {name!r}; public names are in fourfold.__all__")
    value = _find_function(name) if name in _FUNCTIONS else _import(name)
    globals()[name] = value  # the next access does not come here
    return value


def _import(name: str) -> Any:
    try:
        module = importlib.import_module(_MODULE_OF[name])
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _REQUIREMENTS:
            raise
        from fourfold.install import install_command

        command = install_command(_REQUIREMENTS[package])
        raise ImportError(f"fourfold.{name} needs {package}; run `{command}`") from error
    return getattr(module, name)


def _find_function(name: str) -> Any:
    from fourfold.install import find_entry, install_command

    if entry := find_entry("fourfold.functions", name):
        return entry.load()
    command = install_command(_FUNCTIONS[name])
    raise ImportError(f"fourfold.{name} needs {_FUNCTIONS[name]}; run `{command}`")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
