"""Declares what the training loop and its parts use of the objects that `serve.py` gives them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from fourfold.config.reward import RewardConfig
from fourfold.config.schema import AsynchronyConfig, Config, PauseMode
from fourfold.sample import Sample

from ..routing.replica import ReplicaKey, RetryBudget
from ..state.eval_results import Evaluation
from ..state.run_position import RunPosition
from ..state.samples import SampleGroup, StepBatch, Trajectory
from ..weights.update_result import WeightUpdateResult


class RecipeFile(Protocol):
    """The recipe of a run, which its user may edit (`live_recipe.py`)."""

    @property
    def config(self) -> Config:
        """The recipe as it was read last."""

    async def update(self) -> bool:
        """Read the file if it changed; return whether [asynchrony] did.

        A recipe with a mistake changes nothing, and neither do other keys; both are logged once.
        """


class RecipeLog(Protocol):
    """The recipes with which a run was trained (`state/recipe_history.py`)."""

    async def record(self, config: Config) -> None:
        """Record `config`, with which the next step runs; log the keys that differ from the recipe before."""


class PolicyEvaluator(Protocol):
    """Evaluates the policy on the held-out sets of the run (`evaluation/evaluator.py`)."""

    async def run(
        self, *, step: int, version: int, engine: ReplicaKey | None, on_progress: Callable[[int, int], None]
    ) -> Evaluation | None:
        """Evaluate the weights of `version` after `step` steps.

        `engine` answers as long as it is usable; then, or if it is None, any engine with this version or a later one.
        A warning in the log tells that later ones answered.

        Returns None without held-out sets, or when no answer of a set got a score: the mean over the other sets could
        not be compared with that of other steps. `on_progress` is called with the answers that are done, and with the
        number of all.
        """


class StepSource(Protocol):
    """Gives the training loop the samples of each step: of engines (`producer.py`), or of data (`row_feed.py`)."""

    @property
    def data_position(self) -> int:
        """Position of the prompt or the row that is drawn next."""

    @property
    def running(self) -> bool:
        """Whether samples are in generation or scoring."""

    async def run(self) -> None:
        """Make samples in advance, beside `take`, until the last batch is taken."""

    async def resume(self, position: RunPosition, *, version: int, rule: AsynchronyConfig, lag_limit: int) -> None:
        """Continue at a position of the run; for the other arguments see `mark_trained`."""

    async def take(self, step: int) -> StepBatch:
        """Wait for the batch of a step, and take it; raise WrongState if there is nothing to train on."""

    async def look_ahead(self, step: int) -> Sequence[Sample]:
        """Return the samples of the next step while the trainer works on the present one; empty if unknown.

        `take` returns the same samples.
        """

    def mark_trained(self, version: int, rule: AsynchronyConfig, *, lag_limit: int) -> None:
        """Note that the batch that was taken last is trained, and that engines sample `version`; wake `run`.

        Args:
            version: Policy version that new groups are sampled with.
            rule: The table of the recipe; it may change during a run.
            lag_limit: Largest lag that groups admitted from now on may reach, at most `rule.max_policy_lag`.
        """

    def metrics(self, batch: StepBatch, *, policy_version: int) -> dict[str, float]:
        """Return the metrics of a batch that do not need the trainer. Takes milliseconds: call it in a thread."""


class Scores(Protocol):
    """The scores of a run (`rewards/scoring.py`)."""

    async def score(
        self, trajectories: Sequence[Trajectory], budget: RetryBudget, *, evaluation: bool = False
    ) -> list[Trajectory]:
        """Return trajectories of one group, each with its score, or dropped with the reason why it has none.

        `evaluation` has neither canaries nor shadows: all evaluations of a run are scored alike.

        Raises:
            GivenUp: The services of a scorer failed too often.
            ScorerFailed: They did, and `reward.on_error` ends the run for that.
            ServiceMissing: No service of a scorer came in time.
        """

    def is_current(self, group: SampleGroup) -> bool:
        """Return whether a group has the scores that a step may train on: by the scorers that are in use."""

    @property
    def revision(self) -> int:
        """Number of the present set of scorers; a group that is scored now gets it."""


class ShadowScores(Protocol):
    """Scorers that are compared with the live ones (`rewards/shadows.py`). They can neither delay nor stop a run."""

    def start(self, group: SampleGroup) -> None:
        """Have the shadows score a group that has its scores."""

    async def with_shadow_scores(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        """Return the groups of a step, with shadow scores in every sample if the recipe compares gradients.

        If one sample has none, no sample gets one.
        """

    def metrics(self, trained: Mapping[str, float]) -> dict[str, float]:
        """Return the comparisons so far; `trained` has the metrics of the trainer, perhaps a cosine of gradients."""


class Scorers(Protocol):
    """The scorers of a run, which may change while it goes on (`rewards/scorers.py`)."""

    @property
    def tables(self) -> list[RewardConfig]:
        """The tables [[reward]] of the scorers."""

    @property
    def history(self) -> list[dict[str, Any]]:
        """The changes so far."""

    @property
    def costs(self) -> dict[str, float]:
        """US dollars that each scorer has cost in the whole run."""

    def changed_costs(self) -> dict[str, str]:
        """Return the entry of the ledger with the costs; empty if they have not changed since the last call."""


class Certificates(Protocol):
    """The certificates of the members (`routing/membership.py`)."""

    def metrics(self) -> dict[str, float]:
        """Return the metric of a step: the seconds until the first certificate expires."""


class EngineSleep(Protocol):
    """Puts engines to sleep, with `rollout.sleep_mode` (`weights/sleep.py`)."""

    def asleep(self) -> AbstractAsyncContextManager[dict[str, float]]:
        """Keep every engine asleep within the block; yield the time it took by metric name."""


class WeightPublisher(Protocol):
    """Keeps every engine on the trainer's current weights (`weights/broker.py`)."""

    @property
    def lock(self) -> asyncio.Lock:
        """Held while the trainer computes or its weights change: it sends none meanwhile."""

    @property
    def version(self) -> int:
        """The version that was published last; -1: none, or its trainer died."""

    @property
    def held(self) -> ReplicaKey | None:
        """The engine that keeps the version that it has."""

    @property
    def sleeper(self) -> EngineSleep: ...

    async def resync(self, version: int, *, step: int) -> None:
        """Take the trainer's `version` as the current one, after a start or a restore, and update every engine.

        Raises:
            TrainerRestarted: the trainer lost the weights.
            WeightsRefused: no engine can ever accept the weights.
            FourfoldError: the trainer cannot send.
        """

    async def publish(
        self, version: int, *, step: int, on_sampling: Callable[[], None] = lambda: None
    ) -> WeightUpdateResult:
        """Bring all engines to the trainer's `version`; the caller holds `lock`. Raises the errors of `resync`.

        Engines whose update fails are fenced: they get no requests until one succeeds. With no engine left, sampling
        waits for one. `on_sampling` is called when all engines of an update sample with the new weights and take
        requests, while the probes are still compared.
        """

    def hold(self, key: ReplicaKey | None) -> None:
        """Leave one engine out of updates while its weights are evaluated; None: update all."""

    def invalidate(self) -> None:
        """Update no engine until `resync`: the current version was lost with its trainer."""

    def set_pause_mode(self, mode: PauseMode) -> None:
        """Treat running samples so in the updates from now on."""
