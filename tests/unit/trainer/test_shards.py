"""Tests that every layout of masters reads the files of every other layout, without DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.errors import WrongState
from fourfold_trainer.checkpoint import shards, store
from fourfold_trainer.optim import master_weights
from fourfold_trainer.optim.master_weights import MasterSlice, MasterWeights

KINDS = [shards.MASTER, "exp_avg", shards.STEP, shards.EMA]


def whole(**sizes: int) -> MasterWeights:
    """Return masters as at stage 0: one per parameter."""
    slices = [MasterSlice(name=n, first=0, count=c, master=i, offset=0) for i, (n, c) in enumerate(sizes.items())]
    return MasterWeights(tensors=[torch.zeros(c) for c in sizes.values()], slices=slices, sizes=sizes, shared=True)


def partitioned(rank: int, rank_count: int, **sizes: int) -> MasterWeights:
    """Return masters as at stage 3: one for all parameters, each cut into equal padded parts."""
    slices, offset = [], 0
    for name, size in sizes.items():
        part = -(-size // rank_count)
        count = min(part, size - rank * part)
        if count > 0:
            slices.append(MasterSlice(name=name, first=rank * part, count=count, master=0, offset=offset))
        offset += part
    return MasterWeights(tensors=[torch.zeros(offset)], slices=slices, sizes=sizes)


def save(folder: Path, layouts: list[MasterWeights], values: dict[str, Tensor]) -> None:
    """Write these parameters as the ranks with these layouts do; padding is NaN."""
    for rank, layout in enumerate(layouts):
        states = []
        for index, master in enumerate(layout.tensors):
            flat = torch.full((master.numel(),), torch.nan)
            for piece in layout.slices:
                if piece.master == index:
                    part = values[piece.name][piece.first : piece.first + piece.count]
                    flat[piece.offset : piece.offset + piece.count] = part
            states.append({shards.MASTER: flat, "exp_avg": -flat, shards.STEP: torch.tensor(3.0), shards.EMA: 2 * flat})
        random = {"cpu": torch.tensor([rank], dtype=torch.uint8)}
        shards.write(folder, "policy", layout, states, random, rank=rank)


VALUES = {"a": torch.arange(7.0), "b": torch.arange(100.0, 101.0), "c": torch.arange(200.0, 204.0)}
SIZES = {name: len(value) for name, value in VALUES.items()}


def layouts(kind: str) -> list[MasterWeights]:
    """Return the masters of all ranks."""
    if kind == "whole":
        return [whole(**SIZES), whole(**SIZES)]
    return [partitioned(rank, int(kind), **SIZES) for rank in range(int(kind))]


@pytest.mark.parametrize("reader", ["whole", "1", "2", "3", "8"])
@pytest.mark.parametrize("writer", ["whole", "1", "2", "3", "8"])
def test_every_layout_reads_what_every_other_wrote(tmp_path: Path, writer: str, reader: str) -> None:
    save(tmp_path, layouts(writer), VALUES)
    for rank, layout in enumerate(layouts(reader)):
        shard = shards.read(tmp_path, "policy", layout, KINDS, rank=rank)
        for index, state in enumerate(shard.states):
            rest = torch.ones(len(state[shards.MASTER]), dtype=torch.bool)
            for piece in (piece for piece in layout.slices if piece.master == index):
                there = slice(piece.offset, piece.offset + piece.count)
                wanted = VALUES[piece.name][piece.first : piece.first + piece.count]
                assert state[shards.MASTER][there].equal(wanted)
                assert state["exp_avg"][there].equal(-wanted) and state[shards.EMA][there].equal(2 * wanted)
                assert state[shards.STEP].item() == 3
                rest[there] = False
            assert not state[shards.MASTER][rest].any(), "padding is 0"
        writers = len(layouts(writer))
        assert {k: v.tolist() for k, v in shard.random.items()} == ({"cpu": [rank]} if rank < writers else {})


def test_before_the_first_update_there_are_weights_alone(tmp_path: Path) -> None:
    layout = whole(a=3)
    shards.write(tmp_path, "policy", layout, [{shards.MASTER: torch.ones(3)}], {}, rank=0)
    (state,) = shards.read(tmp_path, "policy", layout, KINDS, rank=0).states
    assert list(state) == [shards.MASTER]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"a": 7, "b": 1}, "has 4 elements of c, the model has 0; start the trainer with the model that"),
        ({**SIZES, "d": 5}, "has 0 elements of d, the model has 5"),
        ({**SIZES, "a": 6}, "has 7 elements of a, the model has 6"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, sizes: dict[str, int], message: str) -> None:
    save(tmp_path, layouts("2"), VALUES)
    with pytest.raises(WrongState, match=message):
        shards.read(tmp_path, "policy", whole(**sizes), KINDS, rank=0)


def test_missing_files_holes_and_damage_are_refused(tmp_path: Path) -> None:
    save(tmp_path, layouts("2"), VALUES)
    with pytest.raises(WrongState, match="holds no critic; restore another checkpoint"):
        shards.read(tmp_path, "critic", whole(**SIZES), KINDS, rank=0)
    second = tmp_path / "policy-001.safetensors"
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(WrongState, match="has 4 elements of a, the model has 7"):
        shards.read(tmp_path, "policy", whole(**SIZES), KINDS, rank=0)
    second.write_bytes(content[:-9])
    with pytest.raises(WrongState, match=r"policy-001\.safetensors cannot be read"):
        shards.read(tmp_path, "policy", whole(**SIZES), KINDS, rank=0)
    state = {shards.MASTER: torch.zeros(4), "exp_avg": torch.zeros(2)}
    parts = [{f"{kind}/0/a": value for kind, value in state.items()}, {f"{shards.MASTER}/4/a": torch.zeros(3)}]
    for rank, tensors in enumerate(parts):
        store.write_tensors(tmp_path / shards.rank_file("policy", rank), tensors)
    with pytest.raises(WrongState, match="exp_avg of a has 2 of 7 elements; the checkpoint is damaged"):
        shards.read(tmp_path, "policy", whole(a=7), KINDS, rank=0)


def test_parts_of_a_flat_buffer_are_found_by_their_place_in_memory() -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1, bias=False))
    group = [model[1].weight, model[0].weight, model[0].bias]  # 2, 6 and 2 elements
    buffer = torch.zeros(2 + 3 + 6 + 2 + 3)  # padding after the first and at the end
    for parameter, offset in zip(group, (0, 5, 11), strict=True):
        parameter.data = buffer[offset : offset + parameter.numel()].view(parameter.shape)
    parts = list(buffer.split(8))  # type: ignore[no-untyped-call]
    for rank, wanted in enumerate(
        [[("1.weight", 0, 2, 0), ("0.weight", 0, 3, 5)], [("0.weight", 3, 3, 0), ("0.bias", 0, 2, 3)]]
    ):
        optimizer = SimpleNamespace(
            bit16_groups=[group],
            bit16_groups_flat=[buffer],
            parallel_partitioned_bit16_groups=[parts],
            single_partition_of_fp32_groups=[torch.zeros(8)],
        )
        found = master_weights.find_master_weights(optimizer, model, stage=2, rank=rank)
        assert [(s.name, s.first, s.count, s.offset) for s in found.slices] == wanted
        assert found.sizes == {"0.weight": 6, "0.bias": 2, "1.weight": 2} and not found.shared
