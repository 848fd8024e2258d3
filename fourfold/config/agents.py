"""Defines `[agents]`, `[gateway]` and `[environment]`: trajectories that agents make, and where agents connect."""

from __future__ import annotations

from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from fourfold.config.table import Seconds
from fourfold.table import Table

CONSTRAINED_TOOL_PARSERS: Final = ("hermes", "longcat", "qwen", "qwen2_5")
"""Values of `rollout.tool_parser` that read <tool_call>{"name": ..., "arguments": ...}</tool_call>: the form for which
there is a grammar."""


class AgentsConfig(Table):
    """`[agents]`: whether agents make the trajectories that the run trains on."""

    source: Literal["none", "tasks", "groups"] = "none"
    """none: the coordinator samples one completion of each prompt. tasks: each prompt is a task, which agents attempt
    through a gateway. groups: agents bring their own tasks, and the run needs no training data."""
    reward: Literal["agent", "service"] = "agent"
    """agent: every closed session brings its reward. service: sessions may also ask for a score of the run's reward
    service."""
    lease_seconds: Seconds = 120.0
    """A task is given to another agent after this time without a sign of its gateway."""
    group_seconds: Seconds = 900.0
    """Longest time from the first lease of a group until it closes. Attempts that are missing then are dropped."""
    min_attempts: int = Field(default=0, ge=0, le=256)
    """A group that closes at its deadline is kept if at least this many attempts arrived; 0: all of
    `batch.group_size`."""
    max_segments: int = Field(default=8, ge=1, le=64)
    """Segments of one trajectory; an agent that edits, summarises or branches its history opens further ones."""


class GatewayConfig(Table):
    """`[gateway]`: the entry point of agents."""

    replicas: int = Field(default=0, ge=0, le=64)
    """Gateways that the launcher starts; 0: they are started by hand, or not at all."""
    http_listen: str = "127.0.0.1:0"
    """host:port of the HTTP API; port 0: any free one. Empty: no HTTP. Beyond loopback it needs [security]."""
    public_listen: str = ""
    """host:port of AgentService for agents outside of the run (TLS and a token); empty: none."""
    max_open_sessions: int = Field(default=10_000, ge=1)
    """Open sessions of all agents together with tasks or groups of the run, and as many without; more are refused
    (RESOURCE_EXHAUSTED)."""
    max_open_sessions_per_agent: int = Field(default=2_000, ge=1)
    """Open sessions of one token with tasks or groups of the run, and as many without."""
    max_connections: int = Field(default=1_024, ge=1)
    """HTTP connections in all; more are refused (503)."""
    max_body_mib: int = Field(default=8, ge=1, le=64)
    """Largest body of an HTTP request."""
    body_seconds: Seconds = 30.0
    """Longest time in which the headers, and the body, of an HTTP request must arrive."""


class EnvironmentConfig(Table):
    """`[environment]`: programs that attempt the tasks of the run, as agents of its gateway."""

    replicas: int = Field(default=0, ge=0)
    """Environment services that the launcher starts."""
    kind: Literal["python", "openrlhf", "verifiers", "openenv", "gymnasium", "reasoning_gym"] = "python"
    """python: a class of Fourfold's own protocol. openrlhf: a file with AgentInstance or AgentExecutor. verifiers,
    openenv, gymnasium, reasoning_gym: environments of these libraries."""
    source: str = ""
    """FILE.py:NAME of a class (python, openrlhf), or the name of the environment in its library."""
    options: dict[str, Any] = Field(default={})
    """Arguments of the environment."""
    tools: list[str] = Field(default=[])
    """FILE.py:NAME of functions that the model may call, or "builtin:python" for a sandboxed interpreter."""
    tool_calls: Literal["free", "valid", "required"] = "free"
    """free: the model writes calls without help. valid: a grammar lets it write only calls that fit the tools.
    required: valid, and each turn must have a call until one was made. The tokens that a grammar decides are not
    trained on."""
    max_turns: int = Field(default=8, ge=1)
    """Turns of one episode; it is truncated after them."""
    processes: int = Field(default=1, ge=1)
    """Processes of one service, among which the episodes are divided."""
    concurrent_episodes: int = Field(default=64, ge=1)
    """Episodes of one service at a time."""
    step_seconds: Seconds = 30.0
    """Longest time of one reset or step of the environment; the episode is abandoned after it."""
    episode_seconds: Seconds = 600.0
    """Longest time of one episode; it is truncated after it."""
    network: bool = False
    """Let the environment's processes open network connections."""
    memory_gib: int = Field(default=8, ge=1)
    """Memory of one process."""
    variables: list[str] = Field(default=[])
    """Environment variables that the processes get, by name."""

    @model_validator(mode="after")
    def _has_source(self) -> Self:
        if self.replicas and not self.source and not self.tools:
            raise ValueError(
                f"replicas = {self.replicas} and neither source nor tools is set; set source to FILE.py:NAME or to an "
                f"environment of {self.kind}"
            )
        return self
