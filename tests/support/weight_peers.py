"""Runs real senders and receivers in other processes for the weight tests, driven over a pipe.

The processes come from a fork server that has imported torch already, so that each costs
milliseconds. `Peer` is the test's end; the functions below it run in the other process.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from fourfold.address import LOOPBACK
from fourfold.errors import FourfoldError
from fourfold.weights.apply.base import ApplyReport, ModelState
from fourfold.weights.digest import digest_of
from fourfold.weights.manifest import Manifest, Span, TensorSpec, aligned, partition_count, partition_spans
from fourfold.weights.receiver import WeightReceiver
from fourfold.weights.sender import WeightSender
from fourfold.weights.source.dense import DenseSource
from fourfold.weights.source.fused_params import sent_parameters
from fourfold.weights.tensor_sums import partial_sums
from fourfold.weights.transport.base import TransferGroup, make_receiver
from fourfold.weights.transport.waiting import Deadline

SHAPES: Final[dict[str, tuple[int, ...]]] = {"embed.weight": (37, 8), "mlp.weight": (5, 7, 3), "norm.weight": (8,)}


def make_model(seed: int, *, big: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """Return a module with parameters named as in SHAPES, and one of `big` elements; the same seed, the same values."""
    generator = torch.Generator().manual_seed(seed)
    shapes = dict(SHAPES, **({"big.weight": (big,)} if big else {}))
    model = torch.nn.Module()
    for name, shape in shapes.items():
        owner, _, leaf = name.partition(".")
        module = torch.nn.Module()
        values = torch.randn(shape, generator=generator).to(dtype)
        module.register_parameter(leaf, torch.nn.Parameter(values, requires_grad=False))
        model.add_module(owner, module)
    return model


class Collector:
    """A sink that keeps everything that it takes."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self.taken: list[tuple[Span, torch.Tensor]] = []

    def slot(self, span: Span) -> torch.Tensor | None:
        return None

    def take(self, span: Span, values: torch.Tensor) -> None:
        self.taken.append((span, values))

    def flush(self) -> None:
        pass

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors, in the manifest's order, put together."""
        ordered = sorted(self.taken, key=lambda item: (item[0].tensor, item[0].start))
        parts: list[list[torch.Tensor]] = [[] for _ in self._manifest.tensors]
        for span, values in ordered:
            parts[span.tensor].append(values)
        return [torch.cat(p).view(spec.shape) for p, spec in zip(parts, self._manifest.tensors, strict=True)]


class PartSource:
    """A source that holds each tensor in equal partitions over the ranks, like ZeRO-3; this rank's are views."""

    def __init__(self, model: torch.nn.Module, rank: int, rank_count: int) -> None:
        specs: list[TensorSpec] = []
        spans: list[Span] = []
        offset = 0
        self._flat: list[torch.Tensor] = []
        for _, parameter, pieces in sent_parameters(model):
            mine = [TensorSpec(name=piece.name, dtype="bfloat16", shape=piece.shape) for piece in pieces]
            spans += partition_spans(len(specs), mine, rank_count, offset)
            specs += mine
            flat = parameter.detach().reshape(-1)
            self._flat += [flat[piece.start : piece.start + piece.count] for piece in pieces]
            offset = aligned(offset + partition_count(parameter.numel(), rank_count) * 2)
        self._manifest = Manifest(tensors=tuple(specs), spans=tuple(spans), shard_bytes=(offset,) * rank_count)

    def manifest(self) -> Manifest:
        return self._manifest

    def begin_round(self) -> None:
        pass

    def read(self, span: Span) -> torch.Tensor:
        return self._flat[span.tensor][span.start : span.stop]

    def is_view(self, span: Span) -> bool:
        return True

    def end_round(self) -> None:
        pass


class Peer:
    """A process that runs `target(pipe, *args)`; a call is (method, args), a reply the result or the error."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["tests.support.weight_peers", "fourfold.weights.transport.gloo", "fourfold.weights.transport.shm"]
        )
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=target, args=(other, *args), daemon=True)
        self.process.start()
        other.close()

    def start(self, method: str, *args: Any) -> None:
        """Begin a call."""
        self._pipe.send((method, args))

    def result(self, timeout: float = 20.0) -> Any:
        """Return the result of the oldest call, or raise its error."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"process {self.process.pid} has not replied within {timeout} s")
        kind, value = self._pipe.recv()
        if kind == "error":
            raise value
        return value

    def call(self, method: str, *args: Any) -> Any:
        """Begin a call and wait for it."""
        self.start(method, *args)
        return self.result()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None, "started"
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.join(10)

    def stop(self) -> None:
        """End the process."""
        self._pipe.close()
        self.process.join(10)
        if self.process.is_alive():
            self.kill()


def _serve(pipe: multiprocessing.connection.Connection, methods: dict[str, Callable[..., Any]]) -> None:
    while True:
        try:
            method, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            pipe.send(("ok", methods[method](*args)))
        except (FourfoldError, ValueError, OSError) as error:
            pipe.send(("error", error))


def receiver(pipe: multiprocessing.connection.Connection, manifest: bytes, receiver_count: int, index: int) -> None:
    """A receiving transport: open(epoch, backend, offers, timeout), receive(version, timeout) -> digest, values()."""
    state: dict[str, Any] = {}
    parsed = Manifest.from_bytes(manifest)

    def open_(epoch: int, backend: str, offers: Sequence[bytes], timeout: float) -> None:
        group = TransferGroup(epoch=epoch, manifest=parsed, receiver_count=receiver_count)
        state["transport"] = make_receiver(backend, group, index, torch.device("cpu"))
        state["transport"].accept(offers)
        state["transport"].open(Deadline(timeout))

    def receive(version: int, timeout: float) -> bytes:
        sink = state["sink"] = Collector(parsed)
        state["transport"].receive(version, sink, Deadline(timeout))
        sums = partial_sums(parsed, sink.taken)
        state["transport"].check()
        return digest_of(parsed, sums)

    def values() -> list[list[float]]:
        return [tensor.float().flatten().tolist() for tensor in state["sink"].tensors()]

    def check() -> None:
        state["transport"].check()

    def abort_in(seconds: float) -> None:
        threading.Timer(seconds, state["transport"].abort).start()

    def corrupt() -> None:
        """Flip a bit of the first chunk of gloo's next transfer between its arrival and its departure."""
        upstream, arrived = state["transport"]._links[0], []
        finish = upstream.finish

        def finish_and_flip(*arguments: Any) -> None:
            finish(*arguments)
            arrived.append(1)
            if len(arrived) == 2:  # the first was the header
                state["transport"]._shards[0][0] ^= 1

        upstream.finish = finish_and_flip

    methods: dict[str, Callable[..., Any]] = {
        "open": open_,
        "receive": receive,
        "values": values,
        "check": check,
        "abort_in": abort_in,
        "corrupt": corrupt,
    }
    _serve(pipe, {**methods, "close": lambda: state["transport"].close(), "pid": os.getpid})


class _KeptModel:
    """An applier that takes everything and applies nothing: the weights are in the transport."""

    def bake(self, manifest: Manifest) -> ApplyReport:
        return ApplyReport(direct_tensor_count=0, reload_tensor_count=len(manifest.tensors))

    def begin(self, *, stable: bool) -> None:
        pass

    def slot(self, span: Span) -> torch.Tensor | None:
        return None

    def take(self, span: Span, values: torch.Tensor) -> None:
        pass

    def flush(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def abort(self) -> ModelState:
        return "clean"


def engine(pipe: multiprocessing.connection.Connection, manifest: bytes) -> None:
    """An engine's only worker: open(epoch, backend, offers, timeout), receive, commit, feed -> offers, close."""
    worker = WeightReceiver([_KeptModel()], torch.device("cpu"))
    epochs: list[int] = []

    def open_(epoch: int, backend: str, offers: Sequence[bytes], timeout: float) -> None:
        epochs.append(epoch)
        worker.open(epoch, backend, manifest, offers, 1, 0, timeout)

    methods: dict[str, Callable[..., Any]] = {
        "open": open_,
        "receive": lambda version, timeout: worker.receive(epochs[-1], version, timeout),
        "commit": lambda version: worker.commit(epochs[-1], version),
        "feed": lambda epoch, version, timeout: worker.feed(epoch, version, 1, LOOPBACK, "", timeout),
        "close": lambda: worker.abort(epochs[-1]),
    }
    _serve(pipe, methods)


def sender(
    pipe: multiprocessing.connection.Connection,
    seed: int,
    big: int,
    rank: int,
    rank_count: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """A trainer rank: make_offer, open, send -> (sums, bytes), abort; reseed(seed) stands for an optimizer step.

    It sends bfloat16; parameters of another `dtype` are cast.
    """
    model = make_model(seed, big=big, dtype=dtype).to(device)
    source = PartSource(model, rank, rank_count) if rank_count > 1 else DenseSource(model, dtype=torch.bfloat16)
    weights = WeightSender(source, rank=rank, rank_count=rank_count)

    def make_offer(epoch: int, backend: str, receiver_count: int) -> bytes:
        return weights.make_offer(epoch, backend, receiver_count, timeout=10)

    def open_(epoch: int, timeout: float) -> None:
        weights.open(epoch, timeout=timeout)

    def send(epoch: int, version: int, timeout: float) -> tuple[bytes, int]:
        result = weights.send(epoch, version, timeout=timeout)
        return result.partial_sums, result.sent_bytes

    def reseed(new_seed: int) -> None:
        for old, new in zip(model.parameters(), make_model(new_seed, big=big, dtype=dtype).parameters(), strict=True):
            old.data.copy_(new.data)

    methods: dict[str, Callable[..., Any]] = {
        "make_offer": make_offer,
        "open": open_,
        "send": send,
        "abort": weights.abort,
        "reseed": reseed,
    }
    _serve(pipe, {**methods, "manifest": lambda: weights.manifest().to_bytes(), "pid": os.getpid})
