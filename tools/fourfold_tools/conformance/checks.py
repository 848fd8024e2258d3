"""Runs the checks of one service in order, and keeps their findings.

A check is an async function of a probe, which makes the calls. It raises Violation if the service breaks a rule, and
Skipped if the rule does not concern this service.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

import grpc

from fourfold.errors import ConfigError, DeadlinePassed, FourfoldError, PermissionDenied, Unauthenticated, Unavailable
from fourfold.rpc.status import from_rpc
from fourfold.text import MAX_ERROR, clean

Probe = TypeVar("Probe")
Status = Literal["ok", "broken", "skipped", "not run"]
# After one of these errors the checks that follow would only repeat it, each after a whole time limit.
_USELESS: Final = (DeadlinePassed, PermissionDenied, Unauthenticated, Unavailable)


class Violation(Exception):
    """The service breaks a rule. The text has the behaviour of the service and the rule."""


class Skipped(Exception):
    """The rule does not concern this service. The text says why."""


@dataclass(frozen=True, slots=True)
class Check(Generic[Probe]):
    """One rule of the contract."""

    name: str
    rule: str
    work: Callable[[Probe], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check."""

    name: str
    rule: str
    status: Status
    text: str = ""
    seconds: float = 0.0


class Checks(Generic[Probe]):
    """The checks of one kind of service, in the order of their definition."""

    def __init__(self, *parts: Checks[Probe]) -> None:
        """Join the checks of several parts, or begin without any."""
        self._checks: list[Check[Probe]] = [check for part in parts for check in part._checks]

    def add(self, work: Callable[[Probe], Awaitable[None]]) -> Callable[[Probe], Awaitable[None]]:
        """Add a check, as a decorator. Its name is that of the function, its rule the first line of the docstring."""
        rule = (work.__doc__ or "").strip().partition("\n")[0]
        self._checks.append(Check(work.__name__.removeprefix("check_"), rule, work))
        return work

    @property
    def names(self) -> list[str]:
        """Names of the checks, in order."""
        return [check.name for check in self._checks]

    @property
    def rules(self) -> dict[str, str]:
        """The rule of each check, by its name, in order."""
        return {check.name: check.rule for check in self._checks}

    async def run(
        self,
        probe: Probe,
        *,
        only: Collection[str] = (),
        on_finding: Callable[[Finding], None] = lambda finding: None,
    ) -> Sequence[Finding]:
        """Run all checks, or those of the names `only`; after one without an answer the others are not run."""
        findings: list[Finding] = []
        reason = ""
        for check in self._checks:
            if only and check.name not in only:
                continue
            began = time.monotonic()
            if reason:
                finding = Finding(check.name, check.rule, "not run", reason)
            else:
                status, text, ended = await _outcome(check, probe)
                finding = Finding(check.name, check.rule, status, text, time.monotonic() - began)
                reason = f"{check.name} had no answer" if ended else ""
            findings.append(finding)
            on_finding(findings[-1])
        return findings


async def _outcome(check: Check[Any], probe: Any) -> tuple[Status, str, bool]:
    """Return status and text of a check, and whether the checks after it are useless."""
    try:
        await check.work(probe)
    except Skipped as error:
        return "skipped", clean(str(error), MAX_ERROR), False
    except Violation as error:
        return "broken", clean(str(error), MAX_ERROR), False
    except grpc.aio.AioRpcError as error:
        known = from_rpc(error, peer="the service")
        return "broken", f"{known.reason}: {known.message}", isinstance(known, _USELESS)
    except ConfigError:
        raise
    except FourfoldError as error:
        return "broken", f"{error.reason}: {error.message}", isinstance(error, _USELESS)
    except Exception as error:  # a response of a shape that the check does not expect must not end the command
        text = clean(f"{type(error).__name__}: {error}", MAX_ERROR)
        return "broken", f"a response could not be read, or did not come in time ({text})", False
    return "ok", "", False
