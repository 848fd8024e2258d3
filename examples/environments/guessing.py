"""A game for several turns: the model guesses a number and hears whether the number is higher or lower.

A recipe names the class: `source = "examples/environments/guessing.py:Guessing"`; see recipes/agents_guessing.toml. The
number is the answer of the task. Copy this file to write an environment of your own.
"""

from __future__ import annotations

import re

from fourfold_reward.environment import Action, Done, Observation, Task


class Guessing:
    """One game. The service makes an object for each episode."""

    def __init__(self, highest: int = 10) -> None:
        """Take `environment.options` of the recipe."""
        self.highest = highest
        self.number = 0
        self.guesses = 0
        self.distance = float(highest)

    async def reset(self, task: Task) -> Observation:
        """Begin a game and return what the model sees first."""
        # Any answer gives a number of the game: the last digits of "42" give 2 of 1 to 10.
        self.number = int(re.sub(r"\D", "", task.answer) or "0") % self.highest + 1
        # The system prompt of the recipe comes before this text.
        return Observation(f"Guess my number. It is between 1 and {self.highest}.")

    async def step(self, action: Action) -> Observation | Done:
        """Answer a guess."""
        self.guesses += 1
        found = re.search(r"\d+", action.text)
        if found is None:
            return Observation("That is no number.")
        guess = int(found[0][:9])
        self.distance = min(float(abs(guess - self.number)), self.distance)
        if guess == self.number:
            return Done(1.0, metrics={"guesses": float(self.guesses)})
        return Observation("Higher." if guess < self.number else "Lower.")

    async def truncate(self) -> Done:
        """Return the reward when no turn is left: up to 0.5 for a close guess."""
        return Done(0.5 * (1 - self.distance / self.highest), metrics={"guesses": float(self.guesses)})
