"""The one configuration of a run. A recipe is a TOML file: `load` reads and checks it, `dump` writes it back."""

from fourfold.config.dump import dump
from fourfold.config.load import load
from fourfold.config.schema import (
    AlgorithmConfig,
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    DataSourceConfig,
    EvaluationConfig,
    HoldoutConfig,
    ModelConfig,
    ReferenceConfig,
    RetryConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    SecurityConfig,
    TrainerConfig,
    WeightsConfig,
)

__all__ = [
    "AlgorithmConfig",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DataSourceConfig",
    "EvaluationConfig",
    "HoldoutConfig",
    "ModelConfig",
    "ReferenceConfig",
    "RetryConfig",
    "RewardConfig",
    "RolloutConfig",
    "SamplingConfig",
    "SecurityConfig",
    "TrainerConfig",
    "WeightsConfig",
    "dump",
    "load",
]
