"""Runs a rank as a process of its own: `python -m fourfold_trainer.ranks.main [PATHS] SOCKET`.

Rank 0 starts those of its machine. On other machines the holder of the ranks starts them, with the machine's PATHS.

reader thread    rank 0's commands -> queue; carries out an abort immediately; exits when the channel ends
main thread      queue -> worker -> answer
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fourfold.config import Config
from fourfold.errors import DeadlinePassed, FourfoldError, Unavailable
from fourfold.host.process_tree import die_with_parent
from fourfold_trainer.batches import Array
from fourfold_trainer.ranks.loading import make_worker
from fourfold_trainer.ranks.local_ranks import NAME_VARIABLE
from fourfold_trainer.ranks.placement import RankPlacement
from fourfold_trainer.ranks.rank_channel import BATCH, RankChannel, RankMessage
from fourfold_trainer.ranks.rank_worker import ANSWER, RankWorker, explain_failure

_START_SECONDS: Final = 60.0


class QueuedBatches:
    """The micro-batches of a command, each when it arrives; raises DeadlinePassed or Unavailable if they stop."""

    def __init__(self, count: int, messages: queue.SimpleQueue[RankMessage], *, timeout: float) -> None:
        self._count, self._messages, self._timeout = count, messages, timeout

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence[Array]]:
        for index in range(self._count):
            what = f"micro-batch {index + 1} of {self._count}"
            try:
                message = self._messages.get(timeout=self._timeout)
            except queue.Empty:
                text = f"rank 0 did not send {what} in trainer.step_timeout_seconds = {self._timeout:g}"
                raise DeadlinePassed(text) from None
            if message.name != BATCH:
                self._messages.put(message)
                raise Unavailable(f"rank 0 sent {message.name} instead of {what}")
            yield message.arrays


def main() -> int:
    """Join the process group of rank 0 and carry out its commands; return the exit code."""

    own: Mapping[str, Any] = json.loads(sys.argv[1]) if len(sys.argv) > 2 else {}

    def make(start: Mapping[str, Any], config: Config) -> RankWorker:
        start = {**start, **own}
        if source := start.get("critic_source"):
            config = config.model_copy(update={"critic": config.critic.model_copy(update={"source": source})})
        return make_worker(
            config,
            Path(start["model_folder"]),
            RankPlacement(**start["place"]),
            store_address=start["store_address"],
            run_dir=Path(start["run_dir"]),
        )

    return run_rank(make, start_seconds=own.get("start_seconds", _START_SECONDS))


def run_rank(make: Callable[[Mapping[str, Any], Config], RankWorker], *, start_seconds: float = _START_SECONDS) -> int:
    """Carry out rank 0's commands until it sends `close` or ends; return the exit code.

    `make` gets the fields of rank 0's first message, which comes within `start_seconds`: rank 0 first waits for all
    machines.
    """
    die_with_parent()
    # A terminal, systemd and SLURM signal all processes; rank 0 ends this one after its checkpoint.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[-1])
    channel = RankChannel(connection)
    start = channel.receive(timeout=start_seconds).fields
    config = Config.model_validate(start["config"])
    try:
        return _work(channel, config, make(start, config))
    except FourfoldError as error:
        reason = error.message
    except Exception as error:  # the one broad handler of this process: rank 0 reports the reason
        logging.getLogger(__name__).exception("rank failed")
        reason = explain_failure(error, config)
    sys.stderr.write(f"{os.environ.get(NAME_VARIABLE, 'rank')}: {reason}\n")
    return 1


def _work(channel: RankChannel, config: Config, worker: RankWorker) -> int:
    # One queue: all ranks run the commands in the order in which rank 0 sends them, so that their collectives match.
    commands: queue.SimpleQueue[RankMessage] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, worker, commands), daemon=True).start()
    channel.send(RankMessage(name=ANSWER))
    while (command := commands.get()).name != "close":
        if command.name == BATCH:  # of a command that failed before it
            continue
        timeout = config.trainer.step_timeout_seconds
        command = replace(command, batches=QueuedBatches(command.batch_count, commands, timeout=timeout))
        channel.send(replace(worker.handle(command), sequence=command.sequence))
    worker.close()
    return 0


def _read(channel: RankChannel, worker: RankWorker, commands: queue.SimpleQueue[RankMessage]) -> None:
    closing = False
    while True:
        try:
            message = channel.receive()
        except FourfoldError:
            if closing:
                return
            os._exit(1)  # rank 0 is gone, and the main thread may wait in a collective forever
        if message.name != "abort":
            closing = closing or message.name == "close"
            commands.put(message)
            continue
        try:
            worker.abort_weights(message.fields["epoch"])
        except FourfoldError as error:  # another epoch is open; rank 0 has reported that to the caller
            logging.getLogger(__name__).info(
                "abort refused: epoch=%d reason=%s", message.fields["epoch"], error.message
            )


if __name__ == "__main__":
    sys.exit(main())
