"""The one trainer: calls that are repeated when an answer is lost, and the notice that it was restarted.

A trainer that died and came back has forgotten what it learned since its last checkpoint. It
shows as a new incarnation; every call then raises `TrainerRestarted`, and the loop recovers as
a resumed run does. A trainer that only lost an answer is asked again: its calls are idempotent.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from fourfold.config import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import DeadlinePassed, Overloaded, PeerFault, Unavailable, WrongState
from fourfold.trainer.v1 import trainer_service_pb2 as pb

from ..state.run_board import RunBoard
from .replica import Replica
from .router import INFO_SECONDS, Router

log = logging.getLogger("fourfold.coordinator")

T = TypeVar("T")

SUBJECT: Final = "trainer"

_MAX_BACKOFF_SECONDS: Final = 5.0
_FIRST_BACKOFF_SECONDS: Final = 0.25


class TrainerRestarted(Unavailable):
    """The trainer is another process than the one the run talked to."""


class TrainerSession:
    """Calls to the trainer of this run."""

    def __init__(self, router: Router, config: Config, *, tokenizer_sha256: bytes, board: RunBoard) -> None:
        """Prepare; `connect` follows.

        Args:
            router: knows the trainer.
            config: of the run.
            tokenizer_sha256: of the run.
            board: shows a call that is repeated.
        """
        self._router, self._board = router, board
        self._config = config
        self._tokenizer_sha256 = tokenizer_sha256
        self.name = ""
        """Of the member."""
        self.incarnation = ""
        """Of the process that this session is with."""
        self.policy_version = 0
        """Version of the trainer's present weights."""

    async def connect(self) -> pb.TrainerStatus:
        """Talk to the trainer that is there now; waits for one, and for the next when it dies meanwhile.

        Raises:
            ServiceMissing: none came.
            WrongState: it does not fit the run.
            FourfoldError: a failure that lasted.
        """
        return await self._until_answered("GetStatus", self._present, self._begin)

    async def _begin(self, replica: Replica) -> pb.TrainerStatus:
        status = await replica.trainer.get_status(timeout=INFO_SECONDS)
        if status.tokenizer_sha256 != self._tokenizer_sha256:
            raise WrongState(
                f"{replica.member.peer}: its tokenizer is not the run's; start it with the run's model.source"
            )
        if status.max_context_tokens < self._config.model.max_context_tokens:
            raise WrongState(
                f"{replica.member.peer}: it takes {status.max_context_tokens} tokens, the run has samples of up to "
                f"{self._config.model.max_context_tokens}; start it with the run's recipe"
            )
        self.name, self.incarnation = replica.member.member_id, replica.member.incarnation
        self.policy_version = status.policy_version
        return status

    async def call(self, name: str, work: Callable[[Replica], Awaitable[T]]) -> T:
        """Make an idempotent call; after a lost answer make it again.

        Args:
            name: of the call, for messages.
            work: one try; makes calls with deadlines.

        Raises:
            TrainerRestarted: another process answers now.
            ServiceMissing: the trainer is gone and none came.
            FourfoldError: what the trainer raised, or a failure that lasted.
        """
        return await self._until_answered(name, self._same_process, work)

    async def _until_answered(
        self, name: str, find: Callable[[], Awaitable[Replica]], work: Callable[[Replica], Awaitable[T]]
    ) -> T:
        """Make a call to the trainer that `find` returns; after a lost answer make it again."""
        try:
            return await self._tries(name, find, work)
        finally:
            self._board.resolve_condition(SUBJECT)

    async def _tries(
        self, name: str, find: Callable[[], Awaitable[Replica]], work: Callable[[Replica], Awaitable[T]]
    ) -> T:
        tries, first = 0, 0.0
        while True:
            replica = await find()
            try:
                return await replica.call(work(replica))
            except (Unavailable, DeadlinePassed, Overloaded, PeerFault) as error:
                self._router.faults.record(replica.member.member_id, error.reason, error.message)
                tries += 1
                first = first or self._router.clock.monotonic()
                # A trainer that died holds its lease for a while and is started again: as much time as any service has.
                lasted = self._router.clock.monotonic() - first
                if tries > self._config.retry.infrastructure and lasted > self._config.retry.service_wait_seconds:
                    raise
                log.log(
                    logging.WARNING if tries == 1 else logging.DEBUG,
                    "%s: no answer from the trainer, asking again: %s",
                    name,
                    error,
                )
                self._board.report_condition(SUBJECT, f"{name} is asked again: {error}")
                pause = min(_FIRST_BACKOFF_SECONDS * 2.0**tries, _MAX_BACKOFF_SECONDS)
                await self._router.clock.sleep(error.retry_after or pause)

    async def try_once(self, work: Callable[[Replica], Awaitable[T]]) -> T:
        """Make one try of a call that is not to be repeated.

        Raises:
            TrainerRestarted: another process answers now.
            FourfoldError: what the trainer raised.
        """
        found = self._router.replicas(Role.ROLE_TRAINER)
        if not found:
            raise Unavailable("the trainer is gone")
        return await found[0].call(work(self._same(found[0])))

    async def ensure_answering(self) -> None:
        """Return when the trainer answers; one that died is waited for.

        Raises:
            TrainerRestarted: another process answers now.
            ServiceMissing: the trainer is gone and none came.
            FourfoldError: a failure that lasted.
        """
        await self.call("GetStatus", lambda r: r.trainer.get_status(timeout=INFO_SECONDS))

    async def watch(self) -> None:
        """Return never; raise as soon as the trainer is another process.

        Raises:
            TrainerRestarted: it is.
        """
        while True:
            for replica in self._router.replicas(Role.ROLE_TRAINER)[:1]:
                self._same(replica)
            await self._router.wait_for_change(timeout=1.0)

    async def raise_policy_version(self, version: int) -> int:
        """Raise the number of the trainer's present weights; return what it is now."""
        self.policy_version = await self.call(
            "RaisePolicyVersion", lambda r: r.trainer.raise_policy_version(version, timeout=INFO_SECONDS)
        )
        return self.policy_version

    async def _present(self) -> Replica:
        """Return the trainer that is there; waits for one."""
        found = self._router.replicas(Role.ROLE_TRAINER)
        if not found:
            await self._router.wait_for({Role.ROLE_TRAINER: 1})
            found = self._router.replicas(Role.ROLE_TRAINER)
        return found[0]

    async def _same_process(self) -> Replica:
        return self._same(await self._present())

    def _same(self, replica: Replica) -> Replica:
        """Return the replica when it is the process that the session was made with."""
        if replica.member.incarnation != self.incarnation:
            raise TrainerRestarted(
                f"{replica.member.peer} is a new process; what it learned since its checkpoint is lost"
            )
        return replica
