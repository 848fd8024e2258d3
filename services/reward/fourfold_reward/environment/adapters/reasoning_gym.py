"""Gives the model several attempts at a task of reasoning-gym: it hears that an answer is wrong, and may try again.

The tasks come from the run's data (`data.train.reasoning_gym`). The reward is the score of the last answer.
"""

from __future__ import annotations

from typing import Final

from fourfold.reward.function import RewardFunction, Score, ScoreInput
from fourfold_reward import verifiers
from fourfold_reward.environment.adapters import Factory
from fourfold_reward.environment.protocol import Action, Done, Observation, Task
from fourfold_reward.environment.spec import EnvironmentSpec
from fourfold_reward.loader import VerifierError

_FEEDBACK: Final = "That is not right. Try again."


def load(spec: EnvironmentSpec) -> Factory:
    """Load the scorer of the task `environment.source`, with the options of the task and `feedback`, a text.

    Raises:
        VerifierError: the task is unknown, or its scorer runs the answer as code.
        ImportError: reasoning-gym is not installed.
    """
    if spec.source in verifiers.EVALUATING_TASKS:
        raise VerifierError(
            f"environment.source = {spec.source!r}: the scorer of this task runs the model's answer as code; choose "
            f"another task, or train on it with reward.evaluate_text"
        )
    options = dict(spec.options)
    feedback = str(options.pop("feedback", _FEEDBACK))
    try:
        score = verifiers.load(verifiers.GYM_PREFIX + spec.source, {spec.source: options})
    except LookupError as error:
        raise VerifierError(f"environment.source: {error.args[0]}") from None
    return Factory(make=lambda: GymTask(score, feedback))


class GymTask:
    """The attempts at one problem."""

    def __init__(self, score: RewardFunction, feedback: str) -> None:
        """Take the scorer of the task and the text that follows a wrong answer."""
        self._score, self._feedback = score, feedback
        self._task: Task | None = None
        self._reward = 0.0
        self._answers = 0

    def reset(self, task: Task) -> Observation:
        """Ask the question."""
        self._task = task
        return Observation(task.prompt)

    def step(self, action: Action) -> Observation | Done:
        """Score the answer; end the episode if it is right.

        Raises RuntimeError: the scorer cannot judge the problem.
        """
        task = self._task
        assert task is not None
        prompt = task.prompt[-1].content
        score = self._score(
            ScoreInput(
                sample_id=task.task_id,
                prompt=prompt,
                completion=action.text,
                answer=task.answer,
                metadata=task.metadata,
            )
        )
        if not isinstance(score, Score):
            raise RuntimeError(f"reasoning-gym cannot score this problem: {score}")
        self._reward = float(score.score)
        self._answers += 1
        if self._reward >= 1.0:
            return self._done()
        return Observation(self._feedback)

    def truncate(self) -> Done:
        """Return the score of the last answer."""
        return self._done()

    def _done(self) -> Done:
        return Done(self._reward, metrics={"attempts": float(self._answers)})
