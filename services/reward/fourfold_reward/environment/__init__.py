"""Environments: programs that attempt the tasks of a run as agents of its gateway (role `environment`).

The package exports the interface that users implement, and imports no grpc.
"""

from __future__ import annotations

from fourfold_reward.environment.protocol import (
    Action,
    Agent,
    Done,
    Endpoint,
    Environment,
    Message,
    Observation,
    RawText,
    Task,
    TokenIds,
    ToolCall,
)

__all__ = [
    "Action",
    "Agent",
    "Done",
    "Endpoint",
    "Environment",
    "Message",
    "Observation",
    "RawText",
    "Task",
    "TokenIds",
    "ToolCall",
]
