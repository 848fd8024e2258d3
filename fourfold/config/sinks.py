"""Defines `[logging]`: where the metrics of a run go besides its folder."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from fourfold.config.table import Name
from fourfold.table import Table

SinkName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


class LoggingConfig(Table):
    """`[logging]`: sends the metrics of every step to experiment trackers. Nothing there can slow or stop the run."""

    sinks: list[SinkName] = Field(default=[])
    """Trackers that get the metrics; each is a process of its own."""
    project: str = Field(default="fourfold", min_length=1, max_length=128)
    """Project of W&B and trackio, and experiment of MLflow."""
    group: str = Field(default="", max_length=128)
    """Group of runs in W&B and trackio; a tag in MLflow. Empty: none."""
    tags: list[Name] = Field(default=[])
    """Tags of the run in W&B and MLflow."""
    wandb_entity: str = Field(default="", max_length=128)
    """User or team of W&B; empty: the account's default."""
    tensorboard_dir: str = ""
    """Folder of TensorBoard's event files; empty: a folder of the run, found by `tensorboard --logdir runs`."""

    @field_validator("sinks")
    @classmethod
    def _different(cls, value: list[SinkName]) -> list[SinkName]:
        if twice := next((name for name in value if value.count(name) > 1), None):
            raise ValueError(f'"{twice}" is there twice; remove one')
        return value
