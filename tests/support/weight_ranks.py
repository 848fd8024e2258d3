"""Runs a real DeepSpeed ZeRO-3 rank for the weight tests: `python -m tests.support.weight_ranks RANK COUNT FOLDER`.

For each case it trains two steps, then reports what it would send: the parameters that DeepSpeed gathers, and this
rank's shard, so that the test can assemble the shards.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fourfold.errors import WrongState
from fourfold.weights.manifest import Manifest
from fourfold.weights.source.base import torch_dtype
from fourfold.weights.tensor_sums import partial_sums
from fourfold.weights.transport.staging import span_view
from tests.support.fork_server import run_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One engine."""

    name: str
    folder: str
    dtype: str = "bfloat16"
    sent_dtype: str = ""
    persistence_threshold: int = 100_000
    freeze: str = ""
    offload: bool = False
    """Move the engine's parameters to main memory and back, in between."""
    in_main_memory: bool = False
    """The engine keeps its partitions and its optimizer there always."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The report of one rank."""

    manifest: bytes
    shard: bytes
    sums: bytes
    gathered: dict[str, list[float]]
    statuses_kept: bool
    views: tuple[bool, ...]
    """Of this rank's spans: whether they are views, and were where they are before the training."""
    refused: tuple[str, ...] = ()


def run_ranks(rank_count: int, cases: Sequence[Case], folder: Path) -> list[tuple[Outcome, ...]]:
    """Run the cases on ranks in processes of their own; return for each case the outcomes of all ranks."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    ranks = range(rank_count)
    commands = [("tests.support.weight_ranks", str(rank), str(rank_count), str(folder)) for rank in ranks]
    run_modules(commands, folder / "ranks.log", seconds=200)
    found = [json.loads((folder / f"outcomes-{rank}.json").read_text()) for rank in ranks]
    return list(zip(*([_read(outcome) for outcome in outcomes] for outcomes in found), strict=True))


def _read(outcome: dict[str, Any]) -> Outcome:
    octets = {name: bytes.fromhex(outcome[name]) for name in ("manifest", "shard", "sums")}
    return Outcome(**{**outcome, **octets, "refused": tuple(outcome["refused"]), "views": tuple(outcome["views"])})


def main(rank: int, rank_count: int, folder: Path) -> None:
    """Run the cases of FOLDER/cases.json on one rank; write their outcomes to FOLDER/outcomes-RANK.json."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(rank_count), GLOO_SOCKET_IFNAME="lo")
    import deepspeed
    import deepspeed.ops

    # As the trainer does: otherwise every rank compiles, for 30 s, a shared-memory all-reduce that is never called.
    deepspeed.ops.__compatible_ops__ = {}
    meeting = f"file://{folder / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=rank_count)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    cases = [Case(**case) for case in json.loads((folder / "cases.json").read_text())]
    outcomes = [asdict(_run(case)) for case in cases]
    text = json.dumps(outcomes, default=bytes.hex)
    (folder / f"outcomes-{rank}.json").write_text(text)
    torch.distributed.destroy_process_group()


def _run(case: Case) -> Outcome:
    from fourfold.weights.source.zero3 import Zero3Source

    engine = _engine(case)
    assert hasattr(engine.optimizer, "lp_param_buffer") != case.in_main_memory
    source = Zero3Source(engine, dtype=torch_dtype(case.sent_dtype) if case.sent_dtype else None)
    manifest = source.manifest()
    rank = torch.distributed.get_rank()
    spans = manifest.spans_of_rank(rank)
    places = [source.read(span).data_ptr() for span in spans]
    _train(engine)
    parameters = dict(engine.module.named_parameters())
    refused = _offload(engine, source) if case.offload else ()
    before = [p.ds_status for p in parameters.values()]
    source.begin_round()
    views = [source.is_view(s) and source.read(s).data_ptr() == p for s, p in zip(spans, places, strict=True)]
    shard = torch.zeros(manifest.shard_bytes[rank], dtype=torch.uint8)
    for span in spans:
        span_view(manifest, shard, span).copy_(source.read(span))
    dtypes = [torch_dtype(spec.dtype) for spec in manifest.tensors]
    sums = partial_sums(manifest, ((span, source.read(span).to(dtypes[span.tensor])) for span in spans))
    source.end_round()
    kept = before == [p.ds_status for p in parameters.values()]
    return Outcome(
        manifest=manifest.to_bytes(),
        shard=shard.numpy().tobytes(),
        sums=sums,
        gathered=_gathered(engine.module, manifest),
        statuses_kept=kept,
        views=tuple(views),
        refused=refused,
    )


def _engine(case: Case) -> Any:
    import deepspeed
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch_dtype(case.dtype))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not case.freeze or case.freeze not in name)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for _, p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    place = {"device": "cpu", "pin_memory": False}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": case.dtype == "bfloat16"},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": case.persistence_threshold,
            "sub_group_size": 20_000,
            **({"offload_param": place, "offload_optimizer": place} if case.in_main_memory else {}),
        },
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config)
    return engine


def _train(engine: Any) -> None:
    """Two real optimizer steps, so that every trained value moves."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        ids = torch.randint(3, 500, (1, 24), generator=generator)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


def _offload(engine: Any, source: Any) -> tuple[str, ...]:
    """Offload and reload the engine's parameters; return what the source said to either."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    def offload() -> None:
        engine.offload_states(include=[OffloadStateTypeEnum.lp_params], pin_memory=False)

    said = []
    for action in (offload, engine.reload_states):
        action()
        try:
            source.begin_round()
            said.append("nothing")
        except WrongState as error:
            said.append(error.message)
    return tuple(said)


def _gathered(model: Any, manifest: Manifest) -> dict[str, list[float]]:
    """Return what DeepSpeed gathers, as `save_pretrained` would write it."""
    import deepspeed
    from transformers.core_model_loading import revert_weight_conversion

    parameters = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        written = revert_weight_conversion(model, {name: p.detach() for name, p in parameters.items()})
        return {
            spec.name: written[spec.name].to(torch_dtype(spec.dtype)).float().flatten().tolist()
            for spec in manifest.tensors
        }


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
