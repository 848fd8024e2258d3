"""Runs text environments with the interface of Gymnasium: observations and actions are text.

    reset(seed=..., options={"text", "answer", "metadata"}) -> (observation, info)
    step(text) -> (observation, reward, terminated, truncated, info)

The reward of the episode is the sum of the rewards of its steps.
"""

from __future__ import annotations

import functools
from typing import Any

from fourfold.install import install_command
from fourfold_reward.environment.adapters import Factory
from fourfold_reward.environment.protocol import Action, Done, Observation, Task
from fourfold_reward.environment.spec import EnvironmentSpec, load_object


def load(spec: EnvironmentSpec) -> Factory:
    """Load a class FILE.py:NAME, or the environment that is registered with gymnasium under `environment.source`.

    Raises ImportError: the source is the id of an environment, and gymnasium is not installed.
    """
    if spec.file is not None:
        make = functools.partial(load_object(spec.file)[0], **spec.options)
        return Factory(make=lambda: GymnasiumEpisode(make()))
    try:
        import gymnasium
    except ImportError:
        raise ImportError(
            f"environment.source = {spec.source!r} needs the package gymnasium: "
            f"{install_command('fourfold-reward[gymnasium]')}; or give FILE.py:NAME of a class"
        ) from None
    return Factory(make=lambda: GymnasiumEpisode(gymnasium.make(spec.source, **spec.options)))


class GymnasiumEpisode:
    """One episode. The methods are synchronous, as Gymnasium's; the worker calls them in a thread."""

    def __init__(self, environment: Any) -> None:
        """Wrap a new environment."""
        self._environment = environment
        self._reward = 0.0

    def reset(self, task: Task) -> Observation:
        """Reset with the task's seed; the problem is in the options."""
        options = {
            "text": task.prompt[-1].content,
            "answer": task.answer,
            "answer_value": task.answer_value,
            "metadata": dict(task.metadata),
        }
        observation, _ = self._environment.reset(seed=task.seed % (1 << 31), options=options)
        return Observation(str(observation))

    def step(self, action: Action) -> Observation | Done:
        """Take the model's text as the action."""
        observation, reward, terminated, truncated, _ = self._environment.step(action.text)
        self._reward += float(reward)
        if terminated or truncated:
            return Done(self._reward, truncated=bool(truncated and not terminated))
        return Observation(str(observation))

    def truncate(self) -> Done:
        """Return the rewards so far."""
        return Done(self._reward, truncated=True)

    def close(self) -> None:
        """Close the environment."""
        if (close := getattr(self._environment, "close", None)) is not None:
            close()
