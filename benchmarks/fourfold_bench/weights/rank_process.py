"""Runs one trainer rank of the weight benchmark: random weights behind a `WeightSender`, called over a socket.

Calls and answers are lines of JSON; `abort` is answered at once, all other calls in turn.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from fourfold.errors import FourfoldError, Internal
from fourfold.host.process_tree import die_with_parent
from fourfold.weights.sender import WeightSender
from fourfold.weights.source.base import WeightSource, synchronize
from fourfold.weights.source.dense import DenseSource
from fourfold.weights.source.fused_params import named_weights
from fourfold.weights.worker_control import error_reply
from fourfold_bench.weights.loop import LoopGroup

_SPREAD: Final = 0.02


class _TrainerRank:
    """The weights of one rank. The methods are the calls."""

    def __init__(self, words: dict[str, Any]) -> None:
        self._rank, self._rank_count = words["rank"], words["rank_count"]
        self._device = torch.device(words["device"])
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._loop: LoopGroup | None = None
        self._gather: Callable[[Any], Any] | None = None
        config = transformers.AutoConfig.from_pretrained(words["folder"])
        source: WeightSource
        if words["zero3"]:
            from fourfold.weights.source.zero3 import Zero3Source
            from fourfold_bench.weights import zero3

            zero3.join(self._rank, self._rank_count, self._device, Path(words["rendezvous"]))
            engine = zero3.make_engine(config)
            self._model: torch.nn.Module = engine.module
            self._parts, self._gather = [p.ds_tensor for p in engine.module.parameters()], zero3.gathered
            source = Zero3Source(engine)
        else:
            with self._device:
                make: Any = transformers.AutoModelForCausalLM
                self._model = make.from_config(config, dtype=torch.bfloat16)
            self._model.requires_grad_(False)
            self._parts = list(self._model.parameters())
            source = DenseSource(self._model)
        self._sender = WeightSender(source, rank=self._rank, rank_count=self._rank_count)
        self._draw()

    @torch.no_grad()
    def _draw(self) -> None:
        generator = torch.Generator(self._device).manual_seed(self._rank)
        for part in self._parts:
            part.normal_(0.0, _SPREAD, generator=generator)

    def manifest(self) -> str:
        return self._sender.manifest().to_bytes().hex()

    def make_offer(self, epoch: int, backend: str, receiver_count: int, timeout: float) -> str:
        return self._sender.make_offer(epoch, backend, receiver_count, timeout=timeout).hex()

    def open(self, epoch: int, timeout: float) -> None:
        self._sender.open(epoch, timeout=timeout)

    def send(self, epoch: int, version: int, skip_sums: bool, timeout: float) -> tuple[str, int]:
        result = self._sender.send(epoch, version, skip_sums=skip_sums, timeout=timeout)
        return result.partial_sums.hex(), result.sent_bytes

    def abort(self, epoch: int) -> None:
        self._sender.abort(epoch)

    @torch.no_grad()
    def change(self) -> None:
        """Change every element of every tensor in place, as a step does."""
        for part in self._parts:
            part.neg_()
        synchronize(self._device)

    def tensors(self) -> list[tuple[str, str, list[int]]]:
        """Return name, type and shape of every tensor, in the order of `loop_send`."""
        return [
            (name, str(p.dtype).removeprefix("torch."), list(getattr(p, "ds_shape", p.shape)))
            for name, p in named_weights(self._model)
        ]

    def loop_open(self, rendezvous: str, size: int, timeout: float) -> None:
        if self._rank == 0:
            self._loop = LoopGroup(Path(rendezvous), 0, size, self._device, timeout)

    def loop_send(self) -> None:
        """Broadcast whole tensors one by one: all ranks gather, rank 0 sends."""
        for _, parameter in named_weights(self._model):
            if self._gather is None:
                self._broadcast(parameter)
            else:
                with self._gather(parameter):
                    self._broadcast(parameter)

    def _broadcast(self, parameter: torch.Tensor) -> None:
        if self._loop is not None:
            self._loop.broadcast(parameter.detach().contiguous())


def main() -> None:
    """Answer calls until the parent closes the socket."""
    die_with_parent(os.getppid())
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    connection = socket.socket(fileno=int(sys.argv[1]))
    trainer = _TrainerRank(json.loads(sys.argv[2]))
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    writing = threading.Lock()

    def answer(number: int, method: str, args: list[Any]) -> None:
        try:
            result: Any = getattr(trainer, method)(*args)
        except FourfoldError as error:
            result = error_reply(error)
        except Exception as error:  # the parent raises it
            result = error_reply(Internal(f"{type(error).__name__}: {error}"))
        with writing:
            connection.sendall(json.dumps([number, result]).encode() + b"\n")

    def read() -> None:
        with connection.makefile("rb") as lines:
            for line in lines:
                call = json.loads(line)
                if call[1] == "abort":
                    answer(*call)
                else:
                    calls.put(call)
        calls.put(None)

    threading.Thread(target=read, name="calls", daemon=True).start()
    while (call := calls.get()) is not None:
        answer(*call)


if __name__ == "__main__":
    main()
