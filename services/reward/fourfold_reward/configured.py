"""Finds the function of a recipe's scorer, with its options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from fourfold.config import Config, RewardConfig
from fourfold.errors import ConfigError
from fourfold_reward import loader, verifiers
from fourfold_reward.code import verifier as code_verifier
from fourfold_reward.code.verifier import CODE_TESTS
from fourfold_reward.loader import Verifier, VerifierError
from fourfold_reward.verifiers import GymOptions

_WITHOUT_OPTIONS: Final = ("exact_match", "math_verify", verifiers.GYM)
# Of the time limit of a sample; the rest is for the verifier itself.
_SHARE_OF_TESTS: Final = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredFunction:
    """The function that scores. A caller cannot name code that the recipe does not name."""

    verifier: Verifier
    options: GymOptions  # of the function, and of the tasks that a sample's metadata may name

    @classmethod
    def from_config(cls, config: Config, reward: RewardConfig) -> ConfiguredFunction:
        """Find the function of a recipe.

        Raises ConfigError: it is unknown, or runs text as code without `reward.evaluate_text`.
        """
        found = cls(verifier=_find(reward.function, config), options=_options(config, reward))
        if found.evaluating and not reward.evaluate_text:
            raise ConfigError(
                f"verifier {found.evaluating!r} runs text of the answer as code, and reward.evaluate_text = false; "
                f"set reward.evaluate_text = true to run it in a sandbox, or use another verifier or task"
            )
        return found

    @property
    def evaluating(self) -> str:
        """Name of the function or task that runs text of a sample as code; empty if there is none."""
        return verifiers.find_evaluating(self.verifier.name, self.options)


def _find(name: str, config: Config) -> Verifier:
    sources = (*config.data.train, *config.data.eval)
    fields = dict.fromkeys([config.data.answer_column, *(s.answer_field for s in sources if s.answer_field)])
    try:
        return replace(loader.find(name, directory=Path.cwd()), answer_fields=tuple(fields))
    except VerifierError as error:
        raise ConfigError(f"reward.function = {error}") from None


def _options(config: Config, reward: RewardConfig) -> GymOptions:
    """Return the options of the recipe for its function, besides those of the tasks of its data.

    Raises ConfigError: the function has no options.
    """
    name, given = reward.function, dict(reward.options)
    if given and (not verifiers.is_builtin(name) or name in _WITHOUT_OPTIONS):
        raise ConfigError(
            f"reward.options = {given} are for built-in verifiers with options, and reward.function = {name!r} is "
            f"none of them; remove the options"
        )
    found = dict(_gym_options(config))
    if given:
        found[name.removeprefix(verifiers.GYM_PREFIX)] = given
    if name == CODE_TESTS:
        # Tests that hang are not passed. Without this limit the whole sample would have no score.
        limit = {code_verifier.SECONDS: _SHARE_OF_TESTS * reward.timeout_seconds}
        found[CODE_TESTS] = limit | dict(found.get(CODE_TESTS, {}))
    return found


def _gym_options(config: Config) -> GymOptions:
    """Return the reasoning-gym tasks that this run generates, with their options."""
    sources = (*config.data.eval, *config.data.train)
    options = {source.reasoning_gym: dict(source.options) for source in sources if source.reasoning_gym}
    # An entry of a composite names its own task.
    for part in options.pop("composite", {}).get("datasets", []):
        options.setdefault(part["name"], dict(part.get("config", {})))
    return options
