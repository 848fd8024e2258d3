"""Compares log-probabilities of one fixed prompt between the trainer and each engine after a weight update.

A digest proves that the bytes arrived. The probe proves that the engine computes with them: a stale copy of a matrix
passes every digest and fails the probe.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

import numpy as np

from fourfold.arrays import Float32Array, Int32Array
from fourfold.errors import WrongState
from fourfold.sample import Sample, VersionSpan

from ..routing.replica import ReplicaKey

log = logging.getLogger("fourfold.coordinator")

_MAX_TOKENS: Final = 64
# If the trainer's log-probabilities change by more than rounding on average, or many of them change visibly, those of
# an engine must change, too. Fewer and smaller changes can disappear: a bfloat16 logit between 4 and 8 has steps of
# 0.03, and in a trained model a step of the trainer may move no logit of the engine over the border to the next one.
_LARGE_CHANGE: Final = 0.05  # nats, mean over the prompt
_VISIBLE_CHANGE: Final = 1e-3  # nats
_MANY: Final = 16  # tokens, and at least half of the prompt's


@dataclass(frozen=True, slots=True)
class _Accepted:
    """The values of an engine, and the first version with these values."""

    version: int
    engine: Float32Array
    trainer: Float32Array | None
    """The trainer's values at that version, if known."""


class LogprobProbe:
    """Holds the prompt, the trainer's log-probabilities of two versions, and the last ones of each engine."""

    def __init__(self, token_ids: Int32Array, *, tolerance: float) -> None:
        """Use the first 64 of `token_ids`, int32 [n >= 1]; `tolerance` limits the mean |trainer - engine|, in nats."""
        ids = token_ids[:_MAX_TOKENS]
        # The first token has no log-probability, so the prompt needs at least two.
        self.token_ids: Int32Array = ids if len(ids) > 1 else np.concatenate([ids, ids])
        self._tolerance = tolerance
        self._trainer: dict[int, Float32Array] = {}  # by version; the newest two
        self._engines: dict[ReplicaKey, _Accepted] = {}

    def sample(self) -> Sample:
        """Return the prompt as a sample for `ComputeLogprobs`, at temperature 1."""
        count = len(self.token_ids)
        no_tokens = np.zeros(count, np.bool_)
        return Sample(
            sample_id="probe",
            group_id="probe",
            token_ids=self.token_ids,
            behavior_logprobs=np.full(count, np.nan, np.float32),
            action_mask=no_tokens,
            loss_mask=no_tokens,
            version_spans=(VersionSpan(policy_version=-1, token_count=count),),
            temperature=1.0,
        )

    def has_trainer_logprobs(self, version: int) -> bool:
        return version in self._trainer

    def set_trainer_logprobs(self, version: int, logprobs: Float32Array) -> None:
        """Store the trainer's values at `version`: float32 [n], the first is NaN."""
        self._trainer[version] = logprobs
        for old in sorted(self._trainer)[:-2]:
            del self._trainer[old]

    def set_engine_logprobs(self, key: ReplicaKey, version: int, logprobs: Float32Array) -> None:
        """Store an engine's values at a version that it serves now; later comparisons detect stale weights.

        Equal values keep their version, so that many small changes of the trainer add up.
        """
        old = self._engines.get(key)
        if old is None or old.trainer is None or old.engine.tobytes() != logprobs.tobytes():
            self._engines[key] = _Accepted(version, logprobs, self._trainer.get(version))

    def compare(self, key: ReplicaKey, version: int, logprobs: Float32Array) -> tuple[float, float]:
        """Return mean and largest |trainer - engine|, in nats, of an engine that holds `version`.

        Raises WrongState when the mean is too large (PROBE_DIFFERS), or the engine uses old weights (STALE_WEIGHTS).
        """
        self._check_stale(key, version, logprobs)
        difference = np.abs(self._trainer[version][1:].astype(np.float64) - logprobs[1:])
        mean, largest = float(difference.mean()), float(difference.max())
        if not mean <= self._tolerance:  # true for NaN, too
            raise WrongState(
                f"{key[0]}: after the update to version {version} its log-probabilities of the probe prompt differ "
                f"from the trainer's by {mean:.3g} nats per token on average; weights.probe_tolerance allows "
                f"{self._tolerance:g}: the engine computes with other weights or another precision",
                reason="PROBE_DIFFERS",
            )
        return mean, largest

    def _check_stale(self, key: ReplicaKey, version: int, logprobs: Float32Array) -> None:
        old = self._engines.get(key)
        if old is None or old.trainer is None or old.version == version or logprobs.tobytes() != old.engine.tobytes():
            return
        change = np.abs(self._trainer[version][1:] - old.trainer[1:])
        largest, visible = float(change.max()), int((change > _VISIBLE_CHANGE).sum())
        if largest == 0.0:
            return
        text = (
            f"{key[0]}: stale: its log-probabilities of the probe prompt are bit for bit those of version "
            f"{old.version}, while {visible} of {len(change)} of the trainer's moved, by up to {largest:.3g} nats: the "
            f"engine does not compute with version {version}"
        )
        if float(change.mean()) > _LARGE_CHANGE or visible >= max(_MANY, len(change) / 2):
            raise WrongState(text, reason="STALE_WEIGHTS")
        log.warning("%s (such a small change may be lost in rounding)", text)
