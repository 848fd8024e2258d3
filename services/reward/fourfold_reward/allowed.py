"""Decides which functions the callers of a reward service may select, and with which options."""

from __future__ import annotations

from collections.abc import Mapping
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
class AllowedVerifiers:
    """The verifiers that callers may select. A caller cannot name code that the recipe does not name."""

    default: Verifier
    others: Mapping[str, Verifier]  # of `reward.allowed_verifiers`, by name
    tasks: GymOptions  # options of the default verifier, and of the tasks that a sample's metadata may name

    @classmethod
    def from_config(cls, config: Config, reward: RewardConfig) -> AllowedVerifiers:
        """Find the verifiers of a recipe.

        Raises ConfigError: a verifier is unknown, or runs text as code without `reward.evaluate_text`.
        """
        allowed = cls(
            default=_find(reward.function, "reward.function", config),
            others={name: _find(name, "reward.allowed_verifiers", config) for name in reward.allowed_verifiers},
            tasks=_options(config, reward),
        )
        if allowed.evaluating and not reward.evaluate_text:
            raise ConfigError(
                f"verifier {allowed.evaluating!r} runs text of the answer as code, and reward.evaluate_text = false; "
                f"set reward.evaluate_text = true to run it in a sandbox, or use another verifier or task"
            )
        return allowed

    @property
    def evaluating(self) -> str:
        """Name of an allowed verifier that runs text of a sample as code; empty if there is none."""
        found = (verifiers.find_evaluating(name, self.tasks) for name in (self.default.name, *self.others))
        return next(filter(None, found), "")

    @property
    def pure(self) -> bool:
        """Whether all functions besides the default one are known to be pure."""
        return all(verifiers.is_pure(name) for name in self.others)

    def find(self, name: str) -> Verifier:
        """Return the verifier that a caller selects instead of the default one.

        Raises VerifierError: the verifier is not allowed.
        """
        if (verifier := self.others.get(name)) is None:
            allowed = ", ".join([repr(self.default.name), *map(repr, self.others)])
            raise VerifierError(
                f"{name!r:.200} is not allowed here; allowed: {allowed:.500}. Add it to reward.allowed_verifiers"
            )
        return verifier


def _find(name: str, key: str, config: Config) -> Verifier:
    sources = (*config.data.train, *config.data.eval)
    fields = dict.fromkeys([config.data.answer_field, *(s.answer_field for s in sources if s.answer_field)])
    try:
        return replace(loader.find(name, directory=Path.cwd()), answer_fields=tuple(fields))
    except VerifierError as error:
        raise ConfigError(f"{key} = {error}") from None


def _options(config: Config, reward: RewardConfig) -> GymOptions:
    """Return the options of all verifiers: those of the recipe for the default one, besides the tasks of its data.

    Raises ConfigError: the default verifier has no options.
    """
    name, given = reward.function, dict(reward.options)
    if given and (not verifiers.is_builtin(name) or name in _WITHOUT_OPTIONS):
        raise ConfigError(
            f"reward.options = {given} are for built-in verifiers with options, and reward.function = {name!r} is "
            f"none of them; remove the options"
        )
    found = dict(_gym_options(config, reward))
    if given:
        found[name.removeprefix(verifiers.GYM_PREFIX)] = given
    if CODE_TESTS in (name, *reward.allowed_verifiers):
        # Tests that hang are not passed. Without this limit the whole sample would have no score.
        limit = {code_verifier.SECONDS: _SHARE_OF_TESTS * reward.timeout_seconds}
        found[CODE_TESTS] = limit | dict(found.get(CODE_TESTS, {}))
    return found


def _gym_options(config: Config, reward: RewardConfig) -> GymOptions:
    """Return the reasoning-gym tasks that this run generates or that the recipe allows, with their options."""
    sources = (*config.data.eval, *config.data.train)
    options = {source.reasoning_gym: dict(source.options) for source in sources if source.reasoning_gym}
    # An entry of a composite names its own task.
    for part in options.pop("composite", {}).get("datasets", []):
        options.setdefault(part["name"], dict(part.get("config", {})))
    for name in reward.allowed_verifiers:
        if name.startswith(verifiers.GYM_PREFIX):
            options.setdefault(name.removeprefix(verifiers.GYM_PREFIX), {})
    return options
