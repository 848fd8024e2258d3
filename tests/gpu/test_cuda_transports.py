"""The CUDA transports between real processes, without an engine. Skipped without a GPU; NCCL needs two."""

from __future__ import annotations

import pytest
import torch

from fourfold.errors import DeadlinePassed
from fourfold.weights.manifest import Manifest, Span
from fourfold.weights.source.dense import DenseSource
from fourfold.weights.tensor_sums import partial_sums
from fourfold.weights.transport.base import TransferGroup, make_receiver
from fourfold.weights.transport.nccl import NcclSender
from fourfold.weights.transport.waiting import Deadline
from tests.support.weight_peers import Peer, make_model, sender

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

BIG = 140_000_000  # elements: 280 MB as bfloat16, which is three windows
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["in place", "cast"])


class Target:
    """A sink with a place on the GPU for every tensor; it gives slots for every second one."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self.tensors = [torch.zeros(t.count, dtype=torch.bfloat16, device=device) for t in manifest.tensors]

    def slot(self, span: Span) -> torch.Tensor | None:
        return self._place(span) if span.tensor % 2 else None

    def take(self, span: Span, values: torch.Tensor) -> None:
        self._place(span).copy_(values, non_blocking=True)

    def flush(self) -> None:
        pass

    def _place(self, span: Span) -> torch.Tensor:
        return self.tensors[span.tensor][span.start : span.start + span.count]


@DTYPES
@pytest.mark.parametrize(("backend", "gpu"), [("cuda_ipc", 0), ("cuda_ipc", 1), ("nccl", 1)])
def test_every_version_arrives_from_another_process(backend: str, gpu: int, dtype: torch.dtype) -> None:
    if gpu >= torch.cuda.device_count():
        pytest.skip(f"needs {gpu + 1} GPUs")
    device = torch.device("cuda", gpu)
    trainer = Peer(sender, 1, BIG, 0, 1, "cuda:0", dtype)
    try:
        trainer.start("manifest")
        manifest = Manifest.from_bytes(trainer.result(60))
        group = TransferGroup(epoch=1, manifest=manifest, receiver_count=1)
        receiving = make_receiver(backend, group, 0, device)
        receiving.accept([trainer.call("make_offer", 1, backend, 1)])
        trainer.start("open", 1, 60.0)
        receiving.open(Deadline(60))
        trainer.result(60)
        for version in (2, 3, 4):
            trainer.start("reseed", version)
            trainer.result(60)
            target = Target(manifest, device)
            trainer.start("send", 1, version, 60.0)
            receiving.receive(version, target, Deadline(60))
            sums, sent_bytes = trainer.result(60)
            assert sent_bytes == manifest.byte_count
            assert partial_sums(manifest, zip(manifest.spans, target.tensors, strict=True)) == sums
            wanted = make_model(version, big=BIG, dtype=dtype).parameters()
            for found, parameter in zip(target.tensors, wanted, strict=True):
                assert torch.equal(found.cpu(), parameter.flatten().to(torch.bfloat16))
        receiving.close()
    finally:
        trainer.kill()


@DTYPES
def test_nccl_sends_to_a_group_without_receivers(dtype: torch.dtype) -> None:
    """One GPU is enough for the sender's half: connection, header, windows, staging, abort."""
    source = DenseSource(make_model(1, big=BIG, dtype=dtype).cuda(), dtype=torch.bfloat16)
    group = TransferGroup(epoch=1, manifest=source.manifest(), receiver_count=1)
    sending = NcclSender(group, 0, source)
    assert sending._member is not None
    sending._member._size = 1
    sending.open(Deadline(60))
    for version in (1, 2):
        assert sending.send(version, Deadline(60)) == group.manifest.byte_count
    sending.close()


def test_nccl_members_that_do_not_meet_end_at_their_deadline() -> None:
    trainer = Peer(sender, 1, 0, 0, 1, "cuda:0")
    try:
        trainer.start("make_offer", 1, "nccl", 1)
        trainer.result(60)
        with pytest.raises(DeadlinePassed, match="the meeting of all 2 members"):
            trainer.call("open", 1, 2.0)
    finally:
        trainer.kill()
