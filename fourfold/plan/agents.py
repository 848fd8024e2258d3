"""Describes the part of agents in a run: tasks, gateways and environments."""

from __future__ import annotations

from fourfold.config import Config
from fourfold.text import format_duration


def agents_plan(config: Config) -> list[str]:
    """Return a paragraph each on attempts, gateways and environments; none for a run without agents."""
    if config.agents.source == "none":
        return []
    return [_attempts(config), _gateways(config), _environments(config)]


def _attempts(config: Config) -> str:
    agents, size = config.agents, config.batch.group_size
    if agents.source == "tasks":
        text = f"Each prompt is a task, which agents attempt {size} times through a gateway."
    else:
        text = f"Agents bring their own groups of {size} attempts through a gateway."
    reward = (
        "bring their reward, or ask the reward service for it" if agents.reward == "service" else "bring their reward"
    )
    enough = f" with at least {agents.min_attempts} of them" if agents.min_attempts else ""
    return (
        f"{text} Sessions {reward}. A session has at most {agents.max_segments} segments; an idle task goes to another "
        f"agent after {format_duration(agents.lease_seconds)}. A group that lacks attempts "
        f"{format_duration(agents.group_seconds)} after its first one is {'kept' + enough if enough else 'dropped'}."
    )


def _gateways(config: Config) -> str:
    gateway = config.gateway
    count = (
        f"{gateway.replicas} gateway{'s' if gateway.replicas > 1 else ''}" if gateway.replicas else "started by hand"
    )
    secure = bool(config.security.directory)
    http = f"{'https' if secure else 'http'}://{gateway.http_listen} (HTTP of OpenAI and Anthropic)"
    ports = [http] if gateway.http_listen else []
    ports += [f"{gateway.public_listen} (gRPC)"] if gateway.public_listen else []
    free = ". Port 0 is any free one; the log of the gateway names it" if any(":0 (" in port for port in ports) else ""
    listens = f", at {' and '.join(ports)}{free}" if ports else ", for environments alone"
    return f"{count}{listens}. At most {gateway.max_open_sessions:,} sessions are open at a time."


def _environments(config: Config) -> str:
    environment = config.environment
    if not environment.replicas:
        return "No environment is started: the run waits for agents that connect to the gateway."
    services = f"{environment.replicas} environment service{'s' if environment.replicas > 1 else ''}"
    parts = [f"`{environment.source}` ({environment.kind})"] if environment.source else []
    parts += [f"the tools {', '.join(f'`{tool}`' for tool in environment.tools)}"] if environment.tools else []
    return (
        f"{services}: {' with '.join(parts)}. Each plays at most {environment.concurrent_episodes:,} episodes of at "
        f"most {environment.max_turns} turn{'s' if environment.max_turns > 1 else ''} at a time."
    )
