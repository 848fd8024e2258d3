"""Writes weights and optimizer state to one file per rank, which any number of ranks at any ZeRO stage can read.

    policy-000.safetensors              the elements that rank 0 holds
        master/0/lm_head.weight         float32 elements of the flattened parameter, from element 0 on
        exp_avg/0/lm_head.weight        Adam's moments of the same elements
        exp_avg_sq/0/lm_head.weight
        step/0/lm_head.weight           [1], number of Adam's updates
        momentum/0/...q_proj.weight     replaces Adam's three for a matrix that Muon trains
        ema/0/lm_head.weight            moving average of the same elements, if the recipe has one
        rng.cpu, rng.cuda               state of the rank's random generators
    policy-001.safetensors              the elements that rank 1 holds: master/141557760/lm_head.weight ...

All files together hold every element of every parameter once, without padding. A reader opens all files and reads the
pieces that it needs, so that it never holds more than its own share and one piece.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors
import torch
from torch import Tensor

from fourfold.errors import WrongState
from fourfold_trainer.checkpoint import store
from fourfold_trainer.optim.master_weights import MasterSlice, MasterWeights

MASTER: Final = "master"
STEP: Final = "step"
EMA: Final = "ema"
_RANDOM: Final = "rng."


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's share of a model's state, on the CPU."""

    states: list[dict[str, Tensor]]
    """For each master flat tensors by kind: MASTER, the optimizer's moments, STEP, EMA; 0 in the padding."""
    random: dict[str, Tensor]
    """State of the random generators by name; empty for a rank that did not exist when the files were written."""


def rank_file(model: str, rank: int) -> str:
    """Return the name of a rank's file of `policy` or `critic`."""
    return f"{model}-{rank:03d}.safetensors"


def write(
    folder: Path,
    model: str,
    masters: MasterWeights,
    states: Sequence[Mapping[str, Tensor]],
    random: Mapping[str, Tensor],
    *,
    rank: int,
) -> None:
    """Write this rank's file of `model`, which is `policy` or `critic`, durably.

    Args:
        states: tensors of each master, by kind.
        random: states of the rank's random generators, by name.
    """
    tensors = {f"{_RANDOM}{name}": state for name, state in random.items()}
    # Masters that all ranks share are in the file of rank 0 alone.
    for piece in [] if masters.shared and rank else masters.slices:
        for kind, value in states[piece.master].items():
            flat = value.detach().reshape(-1)
            part = flat if kind == STEP else flat[piece.offset : piece.offset + piece.count]
            tensors[f"{kind}/{piece.first}/{piece.name}"] = part
    store.write_tensors(folder / rank_file(model, rank), tensors)


def read(folder: Path, model: str, masters: MasterWeights, kinds: Collection[str], *, rank: int) -> Shard:
    """Read this rank's share of `kinds`, whatever number of ranks and ZeRO stage the files were written with.

    Each kind but MASTER may be missing. Raises WrongState if a file cannot be read, or holds another model.
    """
    paths = sorted(folder.glob(f"{model}-*.safetensors"))
    if not paths:
        raise WrongState(
            f"{folder} holds no {model}; restore another checkpoint, or begin a new run from an exported model"
        )
    with ExitStack() as stack:
        files = _Files(stack, paths)
        files.check(folder, masters.sizes)
        slices = defaultdict(list)
        for piece in masters.slices:
            slices[piece.master].append(piece)
        states = [_read_master(files, t.numel(), slices[i], kinds) for i, t in enumerate(masters.tensors)]
        return Shard(states=states, random=files.random(rank_file(model, rank)))


class _Files:
    """An index of all ranks' files of a model; elements are read from disk on request."""

    def __init__(self, stack: ExitStack, paths: Sequence[Path]) -> None:
        self._pieces: dict[tuple[str, str], list[tuple[int, int, Path, str]]] = defaultdict(list)
        self._files: dict[Path, Any] = {}
        for path in paths:
            with _readable(path):
                file = self._files[path] = stack.enter_context(safetensors.safe_open(path, framework="pt"))
                keys = file.keys()
                for key in keys:
                    if key.startswith(_RANDOM):
                        continue
                    kind, first, name = key.split("/", 2)
                    (count,) = file.get_slice(key).get_shape()
                    self._pieces[kind, name].append((int(first), int(count), path, key))

    def check(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """Raise WrongState if the files hold another model."""
        found = {name: pieces for (kind, name), pieces in self._pieces.items() if kind == MASTER}
        for name in {**sizes, **found}:
            elements = sum(count for _, count, _, _ in found.get(name, ()))
            if elements != sizes.get(name, 0):
                raise WrongState(
                    f"{folder} has {elements} elements of {name}, the model has {sizes.get(name, 0)}; start the "
                    f"trainer with the model that it was written for, or begin a new run from an exported model"
                )

    def fill(self, target: Tensor, piece: MasterSlice, kind: str) -> int:
        """Copy a slice into `target`, its flattened master; return the number of elements, 0 if the kind is missing."""
        filled = 0
        for first, count, path, key in self._pieces.get((kind, piece.name), ()):
            begin, end = max(first, piece.first), min(first + count, piece.first + piece.count)
            if begin < end:
                with _readable(path):
                    part = self._files[path].get_slice(key)[begin - first : end - first]
                offset = piece.offset + begin - piece.first
                target[offset : offset + end - begin].copy_(part)
                filled += end - begin
        if filled not in (0, piece.count) or (kind == MASTER and not filled):
            raise WrongState(
                f"{kind} of {piece.name} has {filled} of {piece.count} elements; the checkpoint is damaged: restore "
                f"another one"
            )
        return filled

    def step(self, name: str) -> float:
        """Return the number of Adam's updates of a parameter."""
        for _, _, path, key in self._pieces.get((STEP, name), ()):
            with _readable(path):
                return float(self._files[path].get_tensor(key))
        return 0.0

    def random(self, name: str) -> dict[str, Tensor]:
        """Return the states of the random generators in a file; empty if there is no such file."""
        for path, file in self._files.items():
            if path.name == name:
                with _readable(path):
                    keys = file.keys()
                    return {k.removeprefix(_RANDOM): file.get_tensor(k) for k in keys if k.startswith(_RANDOM)}
        return {}


def _read_master(files: _Files, size: int, slices: Sequence[MasterSlice], kinds: Collection[str]) -> dict[str, Tensor]:
    """Return the state of one master, by kind, without kinds that some of its parameters lack."""
    state: dict[str, Tensor] = {}
    for kind in kinds:
        if kind == STEP:
            if count := max((files.step(piece.name) for piece in slices), default=0.0):
                state[kind] = torch.tensor([count])
            continue
        flat = torch.zeros(size)
        filled = [files.fill(flat, piece, kind) for piece in slices]
        if filled and all(filled):
            state[kind] = flat
    state.setdefault(MASTER, torch.zeros(size))  # a master that is all padding has no slice
    return state


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise the errors of a damaged file as WrongState."""
    try:
        yield
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise WrongState(f"{path} cannot be read ({error}); restore another checkpoint") from None
