"""A rank as a process of its own: `python -m fourfold_trainer.ranks.main SOCKET`, started by the policy's rank 0 alone.

reader thread    rank 0's commands -> queue;  an abort is carried out at once;  end of link: exit
main thread      queue -> worker -> answer
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path

from fourfold.config import Config
from fourfold.errors import FourfoldError
from fourfold.host.process_tree import die_with_parent
from fourfold_trainer.ranks.rank_channel import RankChannel, RankMessage
from fourfold_trainer.ranks.rank_processes import RankPlacement, make_worker
from fourfold_trainer.ranks.worker import ANSWER, RankWorker


def main() -> int:
    """Serve rank 0 until it says close, or is gone."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which then ends us
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    link = RankChannel(connection)
    start = link.receive(timeout=60.0).fields
    try:
        worker = make_worker(
            Config.model_validate(start["config"]),
            Path(start["model_folder"]),
            RankPlacement(**start["place"]),
            rendezvous=Path(start["rendezvous"]),
        )
    except FourfoldError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    commands: queue.SimpleQueue[RankMessage] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(link, worker, commands), daemon=True).start()
    link.send(RankMessage(name=ANSWER))
    while (command := commands.get()).name != "close":
        link.send(replace(worker.handle(command), sequence=command.sequence))
    worker.close()
    return 0


def _read(link: RankChannel, worker: RankWorker, commands: queue.SimpleQueue[RankMessage]) -> None:
    closing = False
    while True:
        try:
            message = link.receive()
        except FourfoldError:
            if closing:
                return
            os._exit(1)  # rank 0 is gone, and the main thread may wait in a collective for ever
        if message.name == "abort":
            _abort(worker, message.fields["epoch"])
            continue
        closing = closing or message.name == "close"
        commands.put(message)


def _abort(worker: RankWorker, epoch: int) -> None:
    try:
        worker.abort_weights(epoch)
    except FourfoldError as error:  # another epoch is open: rank 0 has said so to the caller
        logging.getLogger(__name__).info("abort of epoch %d: %s", epoch, error.message)


if __name__ == "__main__":
    sys.exit(main())
