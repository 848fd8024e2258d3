"""`fourfold agents list|drop RUN`: lists the sessions of agents that a run waits for, and gives their tasks to others.

task      session   gateway    turns  idle      expires in  leased for
p3-12-0   1f0c...   gateway-0      2  1:35 min  8:25 min    2:10 min
p3-12-1   -         gateway-0      -  -         1:40 min    20 s
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from google.protobuf.duration_pb2 import Duration

from fourfold.cli.numbers import number
from fourfold.coordinator.client import AsyncTaskClient
from fourfold.coordinator.v1 import experience_service_pb2 as pb
from fourfold.errors import ConfigError, NotFound, Unavailable
from fourfold.host.program import resume_command
from fourfold.text import align_columns, format_duration

from ..launch.run_folder import find_run, is_locked
from ..launch.run_names import COORDINATOR_LOCK
from .weights import add_actions, find_coordinator

_TIMEOUT_SECONDS: Final = 10.0
_ACTIONS: Final = {
    "list": "show the tasks that agents have, and their sessions",
    "drop": "end sessions; other agents get their tasks",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    drop = add_actions(parser, _ACTIONS)["drop"]
    drop.add_argument("names", nargs="*", metavar="ID", help="of a session or a task, as in `fourfold agents list`")
    drop.add_argument("--idle", type=number, metavar="SECONDS", help="all sessions without a call for so long")


def main(args: argparse.Namespace) -> int:
    """Do one action, and print the sessions or what was dropped."""
    if args.action == "drop" and bool(args.names) == (args.idle is not None):
        raise ConfigError("drop needs the ids of sessions or tasks, or --idle SECONDS, and not both")
    address, certs = find_coordinator(args.where, args.recipe)
    try:
        lines = asyncio.run(_act(args, AsyncTaskClient(address, certs=certs, timeout=_TIMEOUT_SECONDS)))
    except Unavailable:
        folder = find_run(Path(args.where))
        if not folder.is_dir() or is_locked(folder / COORDINATOR_LOCK):
            raise
        raise Unavailable(
            f"{folder} does not run, and no agent has a session of it; start it again with: {resume_command(folder)}"
        ) from None
    print("\n".join(lines))
    return 0


async def _act(args: argparse.Namespace, client: AsyncTaskClient) -> list[str]:
    async with client:
        tasks = await client.list_tasks()
        if args.action == "list":
            return table(tasks)
        dropped = chosen(tasks, args.names, args.idle)
        if dropped:
            await client.return_tasks([task.task_id for task in dropped])
    return [f"{task.task_id}: other agents get it" for task in dropped] or [f"no session is idle for {args.idle:g} s"]


def chosen(tasks: Sequence[pb.TaskState], names: Sequence[str], idle: float | None) -> list[pb.TaskState]:
    """Return the tasks with these ids or sessions, or those whose sessions are idle for at least `idle` seconds.

    Raises NotFound: a name is unknown.
    """
    if idle is not None:
        return [task for task in tasks if task.session.HasField("idle") and _seconds(task.session.idle) >= idle]
    known = {name: task for task in tasks for name in (task.session.session_id, task.task_id) if name}
    if unknown := [name for name in names if name not in known]:
        raise NotFound(f"{unknown[0]!r:.140}: no agent has a session or task with this id; see `fourfold agents list`")
    return list({known[name].task_id: known[name] for name in names}.values())


def table(tasks: Sequence[pb.TaskState]) -> list[str]:
    """Return the lines of the table at the top of this module."""
    if not tasks:
        return ["no agent has a task of this run"]
    rows = [("task", "session", "gateway", "turns", "idle", "expires in", "leased for")]
    for task in tasks:
        session, known = task.session, task.HasField("session")
        idle = "samples" if known else "-"
        idle = format_duration(_seconds(session.idle)) if session.HasField("idle") else idle
        turns, left = str(session.turn_count) if known else "-", session.expires_in if known else task.lease_left
        times = (idle, format_duration(_seconds(left)), format_duration(_seconds(task.age)))
        rows.append((task.task_id, session.session_id or "-", task.gateway or "-", turns, *times))
    return align_columns(rows, left=range(len(rows[0])))


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9
