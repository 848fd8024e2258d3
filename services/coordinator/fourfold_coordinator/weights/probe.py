"""The probe: one prompt whose log-probabilities the trainer and every engine must agree on.

A digest says that the bytes arrived. The probe says that they are what the engine computes
with: a cached, pre-packed or never replaced matrix passes every digest and fails here.
"""

from __future__ import annotations

import logging
from typing import Final

import numpy as np

from fourfold.arrays import Float32Array, Int32Array, Sample, VersionSpan
from fourfold.errors import WrongState

log = logging.getLogger("fourfold.coordinator")

ReplicaKey = tuple[str, str]

_MAX_TOKENS: Final = 64
# An engine cannot miss a larger change of the trainer's log-probabilities, in nats; it may round a smaller one away.
_VISIBLE_CHANGE: Final = 1e-3


class LogprobProbe:
    """Compares log-probabilities of a fixed prompt, and remembers those of the version before."""

    def __init__(self, token_ids: Int32Array, *, tolerance: float) -> None:
        """Take the prompt.

        Args:
            token_ids: int32 [n], n >= 1; the first 64 are used.
            tolerance: largest mean |difference|, in nats.
        """
        ids = token_ids[:_MAX_TOKENS]
        self.token_ids: Int32Array = ids if len(ids) > 1 else np.concatenate([ids, ids])
        self._tolerance = tolerance
        self._trainer: dict[int, Float32Array] = {}  # by version, the newest two
        self._engines: dict[ReplicaKey, tuple[int, Float32Array]] = {}

    def sample(self) -> Sample:
        """Return the prompt as the trainer takes it, at temperature 1."""
        count = len(self.token_ids)
        nothing = np.zeros(count, np.bool_)
        return Sample(
            sample_id="probe",
            group_id="probe",
            token_ids=self.token_ids,
            behavior_logprobs=np.full(count, np.nan, np.float32),
            action_mask=nothing,
            loss_mask=nothing,
            version_spans=(VersionSpan(policy_version=-1, token_count=count),),
            temperature=1.0,
        )

    def knows(self, version: int) -> bool:
        """Whether the trainer was asked at this version."""
        return version in self._trainer

    def trainer(self, version: int, logprobs: Float32Array) -> None:
        """Remember what the trainer computes at `version`: float32 [n], the first is NaN."""
        self._trainer[version] = logprobs
        for old in sorted(self._trainer)[:-2]:
            del self._trainer[old]

    def compare(self, key: ReplicaKey, version: int, logprobs: Float32Array) -> tuple[float, float]:
        """Return mean and largest |trainer - engine|, in nats, of an engine that holds `version`.

        Raises:
            WrongState: they differ too much (PROBE_DIFFERS), or the engine computes with old weights (STALE_WEIGHTS).
        """
        self._check_stale(key, version, logprobs)
        difference = np.abs(self._trainer[version][1:].astype(np.float64) - logprobs[1:])
        mean, largest = float(difference.mean()), float(difference.max())
        if not mean <= self._tolerance:  # NaN, too
            raise WrongState(
                f"{key[0]}: after the update to version {version} its log-probabilities of the probe prompt differ "
                f"from the trainer's by {mean:.3g} nats a token on average; weights.probe_tolerance allows "
                f"{self._tolerance:g}: the engine computes with other weights or another precision",
                reason="PROBE_DIFFERS",
            )
        return mean, largest

    def accept(self, key: ReplicaKey, version: int, logprobs: Float32Array) -> None:
        """Remember what an engine computes at a version that it serves now."""
        self._engines[key] = (version, logprobs)

    def _check_stale(self, key: ReplicaKey, version: int, logprobs: Float32Array) -> None:
        before, old = self._engines.get(key, (version, logprobs))
        if before == version or before not in self._trainer or logprobs.tobytes() != old.tobytes():
            return
        change = float(np.abs(self._trainer[version][1:] - self._trainer[before][1:]).max())
        if change == 0.0:
            return
        text = (
            f"{key[0]}: stale: its log-probabilities of the probe prompt are bit for bit those of version {before}, "
            f"while the trainer's moved by up to {change:.3g} nats: the engine does not compute with version {version}"
        )
        if change > _VISIBLE_CHANGE:
            raise WrongState(text, reason="STALE_WEIGHTS")
        log.warning("%s (such a small change may be lost in rounding)", text)
