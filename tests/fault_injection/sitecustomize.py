"""Ends one rank of a trainer with SIGKILL at a chosen moment. Python imports this at its start, from PYTHONPATH.

The file that FOURFOLD_FAULT names says who, when, and at which occurrence from then on: `1 backward 3`. Without the
file nothing ends, so a test lets a trainer come to the step it wants, and writes it then. The moments:

    lookup      inside of a forward pass without gradients: old log-probabilities, the critic's values
    forward     inside of one with gradients
    backward    inside of a backward pass
    optimizer   before an optimizer's step         updated   after it, before anybody has said so
    file        half of a file of a checkpoint is written
    files       all of the checkpoint's files are written, and it is not yet in its place (rank 0)
    removal     a checkpoint that is too old is half removed (rank 0)
    load        some of a model's state is read

In a coordinator it is FOURFOLD_FAULT_CALL: its file names a call, at which occurrence from then on, and who ends before
the call is sent, by pid, or 0 for the coordinator itself: `ReceiveWeights 1 4711`. The file is gone when that is done.
Writes to the ledger are calls, too, before and after them: `before:acknowledge 1 0`, `after:acknowledge 1 0`.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

_WRITES = ("issue", "move", "lease", "acknowledge", "publishing", "record_metrics", "add_eval", "commit_checkpoint")
_seen: Counter[str] = Counter()


def _reach(moment: str) -> bool:
    """Count the moment if it is the one; return whether it is time."""
    try:
        rank, wanted, occurrence = Path(os.environ["FOURFOLD_FAULT"]).read_text().split()
    except FileNotFoundError:
        return False
    if (rank, wanted) != (os.environ.get("RANK"), moment):
        return False
    _seen[moment] += 1
    return _seen[moment] == int(occurrence)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _reached(moment: str) -> None:
    if _reach(moment):
        _die()


def _hook_models() -> None:
    import torch
    from torch.nn.modules.module import register_module_forward_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def after_forward(module: Any, _inputs: Any, output: Any) -> None:
        if not type(module).__name__.endswith("DecoderLayer"):
            return
        if not torch.is_grad_enabled():
            return _reached("lookup")
        _reached("forward")
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.register_hook(lambda _gradient: _reached("backward"))

    register_module_forward_hook(after_forward)
    register_optimizer_step_pre_hook(lambda *_: _reached("optimizer"))
    register_optimizer_step_post_hook(lambda *_: _reached("updated"))


def _hook_files() -> None:
    import fourfold_trainer.checkpoint.store as store

    write, rename, rmtree = store.write_tensors, Path.rename, shutil.rmtree

    def written(path: Path, *arguments: Any, **named: Any) -> None:
        write(path, *arguments, **named)
        if _reach("file"):
            os.truncate(path, path.stat().st_size // 2)
            _die()

    def move(path: Path, target: Any) -> Path:
        if path.name.startswith(".partial-step-"):
            _reached("files")
        return rename(path, target)

    def remove(path: Any, *more: Any, **named: Any) -> None:
        if Path(path).is_dir() and _reach("removal"):
            next(Path(path).iterdir()).unlink()
            _die()
        rmtree(path, *more, **named)

    store.write_tensors, Path.rename, shutil.rmtree = written, move, remove  # type: ignore[assignment,method-assign]


def _hook_reads() -> None:
    import fourfold_trainer.checkpoint.shards as shards

    fill = shards._Files.fill

    def filled(self: Any, *arguments: Any) -> int:
        count = fill(self, *arguments)
        _reached("load")
        return count

    shards._Files.fill = filled  # type: ignore[method-assign, assignment]


def _hook_calls() -> None:
    import fourfold.rpc.channel as channel
    from fourfold_coordinator.state.ledger import Ledger

    send = channel.call

    def reach(name: str) -> None:
        with suppress(FileNotFoundError):
            file = Path(os.environ["FOURFOLD_FAULT_CALL"])
            wanted, occurrence, pid = file.read_text().split()
            _seen[name] += name == wanted
            if name == wanted and _seen[name] == int(occurrence):
                file.unlink()
                os.kill(int(pid) or os.getpid(), signal.SIGKILL)

    async def call(method: Any, request: Any, *, timeout: float, peer: str) -> Any:
        reach(channel.method_name(request))
        return await send(method, request, timeout=timeout, peer=peer)

    def hook(name: str) -> None:
        write = getattr(Ledger, name)

        def written(*arguments: Any, **named: Any) -> Any:
            reach(f"before:{name}")
            result = write(*arguments, **named)
            reach(f"after:{name}")
            return result

        setattr(Ledger, name, written)

    channel.call = call  # before the clients import it
    for name in _WRITES:
        hook(name)


# The ranks alone: what guards them needs none of these imports.
if "FOURFOLD_FAULT" in os.environ and {"serve", "fourfold_trainer.ranks.main"} & set(sys.orig_argv):
    _hook_models()
    _hook_files()
    _hook_reads()
if "FOURFOLD_FAULT_CALL" in os.environ and "coordinator" in sys.orig_argv:
    _hook_calls()
