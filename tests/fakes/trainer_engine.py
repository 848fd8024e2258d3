"""Provides a trainer engine without a model, and samples for it, to test the trainer's services."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fourfold import metrics
from fourfold.address import LOOPBACK
from fourfold.arrays import Float32Array
from fourfold.errors import StaleEpoch
from fourfold.nn.batching import TokenBatch
from fourfold.sample import Sample, VersionSpan
from fourfold.weights.manifest import Manifest, Span, TensorSpec
from fourfold_trainer.batches import PolicyBatch, ValueBatch, WeightedBatch
from fourfold_trainer.engine import RATIO_SQUARE_SUM, RATIO_SUM, SentWeights, UpdateSettings, UpdateSums
from fourfold_trainer.work import Machine, ModelSize

VOCABULARY = 100
T = TypeVar("T")
MANIFEST = Manifest(
    tensors=(TensorSpec(name="w", dtype="float32", shape=(2,)),),
    spans=(Span(tensor=0, start=0, count=2, rank=0, offset=0),),
    shard_bytes=(64,),
)


class FakeEngine:
    """Counts updates; its only weight is that count. Log-probabilities are minus the token id plus that weight."""

    def __init__(self, rank_count: int = 1) -> None:
        self.rank_count = rank_count
        self.machine = Machine(policy=ModelSize(parameters=1000, trained_parameters=1000, attention=10))
        self.updates = 0
        self.settings: list[UpdateSettings] = []
        self.shares: list[Sequence[Sequence[PolicyBatch]]] = []
        self.weighted: list[Sequence[Sequence[WeightedBatch]]] = []
        self.optim_steps: list[tuple[float, float]] = []  # learning rate and clipping norm
        self.grad_norm = 1.5
        # Raised by the next call of any kind, before it changes anything.
        self.error: BaseException | None = None
        # Raised by the next call that changes the engine, in the middle of the change.
        self.change_error: BaseException | None = None
        self.change_count = 0
        self.gate = threading.Event()  # updates, parts of updates and transfers wait until it is set
        self.gate.set()
        self.entered = threading.Event()
        self.epoch = -1
        self.device_uuids: tuple[bytes, ...] = ()
        self.backends: tuple[str, ...] = ("shm", "gloo")
        self.aborted = threading.Event()
        self.left = self.closed = False
        self.order: list[str] = []

    @property
    def vocabulary_size(self) -> int:
        return VOCABULARY

    def update_policy(self, shares: Sequence[Sequence[Any]], settings: UpdateSettings) -> UpdateSums:
        self._change("update_policy")
        self._wait()
        self.shares.append(shares)
        self.settings.append(settings)
        if np.isfinite(self.grad_norm):
            self.updates += 1
        count = sum(int((batch.weights > 0).sum()) for share in shares for batch in share)
        sums = {metrics.MISMATCH_KL: 0.125, metrics.MISMATCH_KL_K1: 0.0, metrics.REFERENCE_KL: 2.0}
        sums |= {metrics.MISMATCH_PROBABILITY: 0.25, metrics.MISMATCH_NONFINITE: 0.0}
        return UpdateSums(
            loss=0.25,
            token_count=count,
            sums={name: value * count for name, value in (sums | {RATIO_SUM: 1.0, RATIO_SQUARE_SUM: 1.0}).items()},
            mismatches=np.full(count, 0.5, np.float32),
            grad_norm=self.grad_norm,
        )

    def keep_gradient(self, shares: Sequence[Sequence[Any]], settings: UpdateSettings) -> int:
        self._change("keep_gradient")
        return 4000

    def compare_gradient(self, shares: Sequence[Sequence[Any]], settings: UpdateSettings) -> list[float]:
        self._change("compare_gradient")
        return [3.0, 4.0, 9.0]

    def update_critic(self, shares: Sequence[Sequence[ValueBatch]], settings: UpdateSettings) -> UpdateSums:
        self._change("update_critic")
        return UpdateSums(loss=0.5, token_count=1, grad_norm=2.5)

    def compute_values(self, shares: Sequence[Sequence[TokenBatch]]) -> list[list[Float32Array]]:
        self._enter("compute_values")
        return [[(b.targets / 4).astype(np.float32) for b in share] for share in shares]

    def in_parallel(self, critic: Callable[[], None], policy: Callable[[], T]) -> T:
        critic()
        return policy()

    def forward_backward(self, shares: Sequence[Sequence[WeightedBatch]]) -> list[list[Float32Array]]:
        self._change("forward_backward")
        self._wait()
        self.weighted.append(shares)
        return [[self._logprobs(b.tokens) for b in share] for share in shares]

    def optim_step(self, *, learning_rate: float, max_grad_norm: float) -> float:
        self._change("optim_step")
        self.optim_steps.append((learning_rate, max_grad_norm))
        if np.isfinite(self.grad_norm):
            self.updates += 1
        return self.grad_norm

    def discard_gradient(self) -> None:
        self._change("discard_gradient")

    def compute_logprobs(
        self, shares: Sequence[Sequence[TokenBatch]], *, entropies: bool = False, energies: bool = False
    ) -> list[list[Float32Array]]:
        self._enter("compute_logprobs")
        rows = [[self._logprobs(b) for b in share] for share in shares]
        return [[np.stack([row, -row / 2], 1) for row in share] for share in rows] if entropies or energies else rows

    def _logprobs(self, batch: TokenBatch) -> Float32Array:
        return (self.updates - batch.targets).astype(np.float32)

    def release_memory(self) -> None:
        self._enter("release_memory")

    def save(self, folder: Path) -> None:
        self._enter("save")
        (folder / "policy-000.safetensors").write_text(str(self.updates))

    def commit(self, partial: Path, target: Path) -> None:
        pass

    def keep_checkpoints(self, folder: Path, names: Sequence[str]) -> None:
        pass

    def collect_checkpoints(self, folder: Path) -> None:
        pass

    def load(self, folder: Path) -> None:
        self._change("load")
        self.updates = int((folder / "policy-000.safetensors").read_text())

    def export(self, folder: Path, *, ema: bool = False) -> None:
        (folder / "config.json").write_text("{}")
        self._enter("export")
        (folder / "model.safetensors").write_text(f"{self.updates}{' on average' if ema else ''}")

    def export_critic(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text(f"critic {self.updates}")

    def manifest(self) -> Manifest:
        return MANIFEST

    def make_offers(
        self,
        epoch: int,
        backend: str,
        receiver_count: int,
        *,
        group: int = 0,
        host: str = LOOPBACK,
        interface: str = "",
        timeout: float,
    ) -> list[bytes]:
        self._enter("make_offers")
        if group == 0 and epoch <= self.epoch:
            raise StaleEpoch(f"epoch {epoch} is not above {self.epoch}")
        self.epoch = epoch
        return [f"{backend}-{receiver_count}-{rank}-{group}".encode() for rank in range(self.rank_count)]

    def open_weights(self, epoch: int, *, timeout: float) -> None:
        self._enter("open_weights")
        self._check(epoch)

    def send_weights(self, epoch: int, policy_version: int, *, skip_sums: bool = False, timeout: float) -> SentWeights:
        self._enter("send_weights")
        self._check(epoch)
        self.entered.set()
        while not self.gate.wait(0.01):
            if self.aborted.is_set():
                raise StaleEpoch(f"epoch {epoch} was aborted")
        sums = b"" if skip_sums else bytes(16)
        return SentWeights(weights_digest=bytes([self.updates]) * 32, sent_bytes=8, sums=sums)

    def abort_weights(self, epoch: int) -> None:
        self._check(epoch)
        self.aborted.set()

    def leave(self) -> None:
        self._enter("leave")
        self.left = True

    def close(self) -> None:
        self.closed = True

    def _check(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise StaleEpoch(f"epoch {epoch} is not open; {self.epoch} is")

    def _wait(self) -> None:
        self.entered.set()
        if not self.gate.wait(20):
            raise RuntimeError("the test did not set `gate` within 20 s")

    def _change(self, what: str) -> None:
        self._enter(what)
        self.change_count += 1
        error, self.change_error = self.change_error, None
        if error is not None:
            self.updates += 1000  # as if some ranks had changed
            raise error

    def _enter(self, what: str) -> None:
        self.order.append(what)
        error, self.error = self.error, None
        if error is not None:
            raise error


def sample(
    sample_id: str,
    *,
    group: str = "g",
    score: float | None = 1.0,
    prompt: int = 3,
    completion: int = 2,
    version: int = 0,
    temperature: float = 1.0,
    reference: bool = False,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
) -> Sample:
    """Return one sample of random tokens: `prompt` tokens, then `completion` tokens that `version` sampled."""
    random = np.random.default_rng([seed, *sample_id.encode()])
    count = prompt + completion
    mask = np.arange(count) >= prompt
    behavior = np.where(mask, -random.random(count), np.nan).astype(np.float32)
    spans = [VersionSpan(policy_version=-1, token_count=prompt)]
    if completion:
        spans.append(VersionSpan(policy_version=version, token_count=completion))
    return Sample(
        sample_id=sample_id,
        group_id=group,
        token_ids=random.integers(0, vocabulary, count).astype(np.int32),
        behavior_logprobs=behavior,
        action_mask=mask,
        loss_mask=mask,
        version_spans=tuple(spans),
        temperature=temperature,
        score=score,
        reference_logprobs=np.where(np.arange(count) > 0, -4 - 4 * random.random(count), np.nan).astype(np.float32)
        if reference
        else np.empty(0, np.float32),
    )


def group_of(scores: Sequence[float], *, group: str = "g", version: int = 0, **more: object) -> list[Sample]:
    """Return one group of samples with these scores."""
    make: Callable[..., Sample] = sample
    return [make(f"{group}-{i}", group=group, score=s, version=version, **more) for i, s in enumerate(scores)]
