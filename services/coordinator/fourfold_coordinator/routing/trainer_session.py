"""Calls the trainer: repeats calls whose response was lost, and detects that the trainer restarted.

A restarted trainer has lost the steps after its last checkpoint. It registers with a new incarnation; every call then
raises `TrainerRestarted`, and the loop recovers like a resumed run. Calls are idempotent, so a trainer that only failed
to answer gets the same call again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from fourfold.config.schema import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import DeadlinePassed, Overloaded, PeerFault, Unavailable, WrongState
from fourfold.sample import Sample
from fourfold.tracing.spans import NONE, Attributes, Span, Spans, enabled
from fourfold.trainer.client import takes_steps_ahead, train_step_ahead
from fourfold.trainer.v1 import trainer_service_pb2 as pb

from ..state.run_board import RunBoard
from ..state.sample_traces import TRAIN_STEP
from .replica import INFO_SECONDS, Replica
from .router import Router

log = logging.getLogger("fourfold.coordinator")

T = TypeVar("T")
Experiences = Callable[[Callable[[], None]], Iterator[Sample]]

SUBJECT: Final = "trainer"
_MAX_BACKOFF_SECONDS: Final = 5.0
_FIRST_BACKOFF_SECONDS: Final = 0.25
_IDLE_SECONDS: Final = 0.1
# Names of calls in timeline.jsonl.
_PHASES: Final = {"TrainStep": "train", "SaveCheckpoint": "checkpoint", "ExportModel": "export"}
_WORKING: Final = (
    pb.TRAINER_PHASE_TRAINING,
    pb.TRAINER_PHASE_PUBLISHING,
    pb.TRAINER_PHASE_SAVING,
    pb.TRAINER_PHASE_COMPUTING,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepAhead:
    """A step whose samples are sent, and which begins when `start` is set."""

    step: int
    replica: Replica
    start: asyncio.Event
    response: asyncio.Future[pb.TrainStepResponse]


class TrainerRestarted(Unavailable):
    """The trainer is a new process."""


class TrainerSession:
    """Calls to one trainer process, which `connect` chooses."""

    def __init__(self, router: Router, config: Config, board: RunBoard) -> None:
        self._router, self._board, self._config = router, board, config
        self.name = ""  # member id of the trainer
        self.incarnation = ""
        self.policy_version = 0  # policy version of the trainer's present weights
        self._takes_ahead = False  # whether this process may be sent a step before its turn
        self._ahead: _StepAhead | None = None

    async def connect(self) -> pb.TrainerStatus:
        """Start a session with the trainer that is registered now; wait for one if there is none."""
        self.drop_ahead()
        return await self._repeat("GetStatus", self._begin, any_process=True)

    async def _begin(self, replica: Replica) -> pb.TrainerStatus:
        status = await replica.trainer.get_status(timeout=INFO_SECONDS)
        if status.tokenizer_sha256 != self._router.tokenizer_sha256:
            raise WrongState(
                f"{replica.member.peer}: its tokenizer is not the run's; start it with the run's model.source"
            )
        if status.max_context_tokens < self._config.model.max_context_tokens:
            raise WrongState(
                f"{replica.member.peer}: it takes {status.max_context_tokens} tokens, the run has samples of up to "
                f"{self._config.model.max_context_tokens}; start it with the run's recipe"
            )
        self.name, self.incarnation = replica.member.member_id, replica.member.incarnation
        self.policy_version, self._takes_ahead = status.policy_version, takes_steps_ahead(replica.trainer)
        return status

    def send_ahead(self, step: int, samples: Sequence[Sample]) -> None:
        """Send the samples of the next step while the trainer trains the one before it.

        The trainer reads and decodes them, and begins the step when `begin_ahead` or `train_step` says so. After a
        failure here, `train_step` sends them again. A trainer of an earlier contract gets every step in its turn.
        """
        self.drop_ahead()
        try:
            replica = self.trainer()
        except Unavailable:
            return
        if not samples or not self._takes_ahead:
            return
        start = asyncio.Event()
        task = asyncio.ensure_future(self._call_ahead(replica, step, samples, start))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio logs it
        self._ahead = _StepAhead(step=step, replica=replica, start=start, response=task)

    async def _call_ahead(
        self, replica: Replica, step: int, samples: Sequence[Sample], start: asyncio.Event
    ) -> pb.TrainStepResponse:
        timeout = 2 * self._config.trainer.step_timeout_seconds  # for the step before, too
        member = replica.member.member_id
        known: Attributes = {"fourfold.member": member, "fourfold.step": step, "fourfold.sent_ahead": True}
        # The span of the step begins later, so the trainer's work on it has this one as its parent.
        with Spans({0: Span(TRAIN_STEP, None, kind="client", attributes=known)}) if enabled() else NONE:
            return await replica.call(train_step_ahead(replica.trainer, step, samples, start, timeout=timeout))

    def begin_ahead(self) -> None:
        """Begin the step that was sent ahead, if there is one: the ledger has the one before. `train_step` follows."""
        if self._ahead is not None:
            self._ahead.start.set()

    def drop_ahead(self) -> None:
        """Cancel the call of a step that was sent and has not begun. Idempotent."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.response.cancel()

    async def train_step(
        self, step: int, experiences: Experiences, on_sent: Callable[[], None]
    ) -> pb.TrainStepResponse:
        """Train one step. When the response is lost, the step is sent again with the same bytes.

        Args:
            step: number of the step.
            experiences: returns the samples, each time in the same order, and calls its argument after the last one.
            on_sent: called when the trainer has the last one.

        Raises the errors of `call`.
        """
        response = await self.call("TrainStep", lambda r: self._train_once(r, step, experiences, on_sent))
        self.policy_version = response.policy_version
        return response

    async def _train_once(
        self, replica: Replica, step: int, experiences: Experiences, on_sent: Callable[[], None]
    ) -> pb.TrainStepResponse:
        response = await self._train_ahead(replica, step, on_sent)
        if response is None:
            timeout = self._config.trainer.step_timeout_seconds
            response = await replica.trainer.train_step(step, experiences(on_sent), timeout=timeout)
        before = self.policy_version
        if not before <= response.policy_version <= before + 1:  # a step makes at most one version
            text = f"TrainStep: policy_version {response.policy_version} after {before}; it must be {before} or 1 more"
            raise PeerFault(replica.member.peer, "BAD_VERSION", text)
        return response

    async def _train_ahead(
        self, replica: Replica, step: int, on_sent: Callable[[], None]
    ) -> pb.TrainStepResponse | None:
        """Return the response to a step that this trainer was sent ahead; None if it must be sent now."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        try:
            if ahead.step != step or ahead.replica is not replica or ahead.response.done():
                return None
            ahead.start.set()
            on_sent()  # not before: it lets the step after this one be sent, which the trainer would refuse
            return await ahead.response
        except (WrongState, Overloaded) as error:  # refused before it began
            log.debug("Step sent again. step=%d reason=%s", step, error)
            return None
        finally:
            ahead.response.cancel()

    async def call(self, name: str, work: Callable[[Replica], Awaitable[T]]) -> T:
        """Make an idempotent call, `name` in messages, and repeat it when the response is lost.

        Raises TrainerRestarted when the trainer is a new process, ServiceMissing when no trainer came in time.
        """
        return await self._repeat(name, work)

    def trainer(self) -> Replica:
        """Return the trainer; raise Unavailable while there is none, and TrainerRestarted when it is a new process."""
        for replica in self._router.replicas(Role.ROLE_TRAINER):
            return self._check_incarnation(replica)
        raise Unavailable("no trainer is registered")

    async def try_once(self, work: Callable[[Replica], Awaitable[T]]) -> T:
        """Make one try of a call that must not be repeated. Raises the errors of `trainer`, too."""
        replica = self.trainer()
        return await replica.call(work(replica))

    async def wait_until_idle(self) -> pb.TrainerStatus:
        """Wait until the trainer has ended the call of an earlier coordinator; return its status.

        Raises DeadlinePassed when it works longer than trainer.step_timeout_seconds.
        """
        limit = self._config.trainer.step_timeout_seconds
        end = self._router.clock.monotonic() + limit
        try:
            while True:
                status = await self.call("GetStatus", lambda r: r.trainer.get_status(timeout=INFO_SECONDS))
                if status.phase not in _WORKING:
                    return status
                work = pb.TrainerPhase.Name(status.phase).removeprefix("TRAINER_PHASE_").lower()
                if self._router.clock.monotonic() >= end:
                    raise DeadlinePassed(
                        f"{self.name} is still {work} for a coordinator that is gone, after {limit:g} s "
                        f"(trainer.step_timeout_seconds); restart it"
                    )
                self._board.report_condition(SUBJECT, f"{self.name} is {work} for a coordinator that is gone")
                await self._router.clock.sleep(_IDLE_SECONDS)
        finally:
            self._board.resolve_condition(SUBJECT)

    async def ensure_answering(self) -> None:
        """Return when the trainer answers; wait for it if it died. Raises the errors of `call`."""
        await self.call("GetStatus", lambda r: r.trainer.get_status(timeout=INFO_SECONDS))

    def check_process(self) -> None:
        """Raise TrainerRestarted when the registered trainer is a new process."""
        for replica in self._router.replicas(Role.ROLE_TRAINER)[:1]:
            self._check_incarnation(replica)

    async def raise_policy_version(self, version: int) -> int:
        """Raise the policy version of the trainer's present weights; return the new one."""
        self.policy_version = await self.call(
            "RaisePolicyVersion", lambda r: r.trainer.raise_policy_version(version, timeout=INFO_SECONDS)
        )
        return self.policy_version

    async def run_all(self, work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Run coroutines concurrently, started in order; return their results in order.

        The first error cancels the others and is raised. A restart of the trainer does the same, because the work is
        lost with it. TrainerRestarted has precedence over other errors, because the run can continue after it.
        """
        try:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(self._raise_on_restart())
                tasks = [group.create_task(coroutine) for coroutine in work]
                if tasks:
                    await asyncio.wait(tasks)
                watcher.cancel()
        except BaseExceptionGroup as errors:
            found = list(leaves(errors))
            raise next((e for e in found if isinstance(e, TrainerRestarted)), found[0]) from None
        return [task.result() for task in tasks]

    async def _raise_on_restart(self) -> None:
        while True:
            self.check_process()
            await self._router.wait_for_change(timeout=1.0)

    async def _repeat(self, name: str, work: Callable[[Replica], Awaitable[T]], *, any_process: bool = False) -> T:
        """Do `work` with the trainer until a try succeeds or the retries are used up."""
        tries, first_failure = 0, 0.0
        clock, retry = self._router.clock, self._config.retry
        try:
            while True:
                replica = await self._registered()
                if not any_process:
                    self._check_incarnation(replica)
                try:
                    timeline, phase = self._router.timeline, _PHASES.get(name)
                    with timeline.during(replica.member.member_id, phase) if phase else nullcontext():
                        replica.pending_call = name
                        result = await replica.call(work(replica))
                    replica.moved_at = clock.monotonic()
                    return result
                except (Unavailable, DeadlinePassed, Overloaded, PeerFault) as error:
                    self._router.faults.record(replica.member.member_id, error.reason, error.message)
                    tries += 1
                    first_failure = first_failure or clock.monotonic()
                    # A dead trainer keeps its lease for a while and is then started again. The wait is as long as for
                    # any other service.
                    failing = clock.monotonic() - first_failure
                    if tries > retry.infrastructure and failing > retry.service_wait_seconds:
                        raise
                    level = logging.WARNING if tries == 1 else logging.DEBUG
                    log.log(level, "%s: the trainer did not answer; repeating the call: %s", name, error)
                    self._board.report_condition(SUBJECT, f"{name} is asked again: {error}")
                    backoff = min(_FIRST_BACKOFF_SECONDS * 2.0**tries, _MAX_BACKOFF_SECONDS)
                    await clock.sleep(error.retry_after or backoff)
                finally:
                    replica.pending_call = ""
        finally:
            self._board.resolve_condition(SUBJECT)

    async def _registered(self) -> Replica:
        replicas = self._router.replicas(Role.ROLE_TRAINER)
        if not replicas:
            await self._router.wait_for({Role.ROLE_TRAINER: 1})
            replicas = self._router.replicas(Role.ROLE_TRAINER)
        return replicas[0]

    def _check_incarnation(self, replica: Replica) -> Replica:
        """Return the replica, or raise TrainerRestarted when it is not the process of this session."""
        if replica.member.incarnation != self.incarnation:
            raise TrainerRestarted(
                f"{replica.member.peer} is a new process; what it learned since its checkpoint is lost"
            )
        return replica


def leaves(errors: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the errors in a group and its nested groups."""
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
