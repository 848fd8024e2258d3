"""Configures a run by a recipe, a TOML file: `load` reads and checks it, `dump` writes it back."""

from fourfold.config.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    FilterConfig,
    KlConfig,
    ShapingConfig,
)
from fourfold.config.placement import PlacementConfig, gpu_count, gpu_places
from fourfold.config.presets import PRESETS
from fourfold.config.recipe import dump, from_tables, load
from fourfold.config.rollout import RolloutConfig
from fourfold.config.schema import (
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
    SamplingConfig,
    SecurityConfig,
    WeightsConfig,
)
from fourfold.config.trainer import CriticConfig, LoraConfig, TrainerConfig

__all__ = [
    "PRESETS",
    "AlgorithmConfig",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "CorrectionConfig",
    "CriticConfig",
    "DataConfig",
    "DataSourceConfig",
    "EvaluationConfig",
    "FilterConfig",
    "HoldoutConfig",
    "KlConfig",
    "LoraConfig",
    "ModelConfig",
    "PlacementConfig",
    "ReferenceConfig",
    "RetryConfig",
    "RewardConfig",
    "RolloutConfig",
    "SamplingConfig",
    "SecurityConfig",
    "ShapingConfig",
    "TrainerConfig",
    "WeightsConfig",
    "dump",
    "from_tables",
    "gpu_count",
    "gpu_places",
    "load",
]
