"""Loads environments of other libraries, and of users' files, as objects of Fourfold's interface.

Each module has one kind of `environment.kind` and imports its library only when it is used. This package runs in worker
processes.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from fourfold_reward.environment.protocol import Action, Done, Message, Observation, Task
from fourfold_reward.environment.spec import EnvironmentSpec, load_object
from fourfold_reward.loader import VerifierError

_MODULES: Final = ("openrlhf", "verifiers", "openenv", "gymnasium", "reasoning_gym")


@dataclass(frozen=True, slots=True, kw_only=True)
class Factory:
    """Makes the object of an episode."""

    make: Callable[[], Any]
    is_agent: bool = False
    """It has `run` instead of `reset` and `step`."""
    wants_text: bool = False
    """Its tasks have their messages rendered as text, by the chat template."""


def load(spec: EnvironmentSpec) -> Factory:
    """Load an environment. Users' code runs and may raise any exception.

    Raises:
        VerifierError: the file does not define the class, or a library does not know the name.
        ImportError: a library is not installed.
    """
    if spec.kind in _MODULES:
        module: Any = importlib.import_module(f"{__name__}.{spec.kind}")
        factory: Factory = module.load(spec)
        return factory
    if not spec.source:
        return Factory(make=OneAnswer)
    found, _ = load_object(spec.file or {})
    has_steps = hasattr(found, "reset") and hasattr(found, "step")
    if not callable(found) or not (has_steps or hasattr(found, "run")):
        raise VerifierError(f"{spec.source} is {found!r:.100}; it must be a class with reset and step, or with run")
    return Factory(make=functools.partial(found, **spec.options), is_agent=not has_steps)


class OneAnswer:
    """The environment of recipes that have tools and no source: the first answer without a tool call is scored."""

    def reset(self, task: Task) -> Observation:
        """Return the task's own prompt."""
        return Observation(task.prompt)

    def step(self, action: Action) -> Done:
        """End the episode; the run's reward service scores it."""
        return Done(None)

    def truncate(self) -> Done:
        """End the episode, so that the reward service scores its turns so far."""
        return Done(None)


def first_prompt(task: Task, text: str) -> tuple[Message, ...]:
    """Return the system messages of a task, and the first observation as a message of the user."""
    return (*(message for message in task.messages if message.role == "system"), Message("user", text))
