"""A model's optimizer state in files, one per rank, that any number of ranks at any ZeRO stage can read.

    policy-000.safetensors              what rank 0 holds
        master/0/lm_head.weight         float32 elements of the flattened parameter, from element 0 on
        exp_avg/0/lm_head.weight        Adam's moments of the same elements
        exp_avg_sq/0/lm_head.weight
        step/0/lm_head.weight           [1], updates that Adam has made
        momentum/0/...q_proj.weight     Muon's, of what it trains, in place of these three
        ema/0/lm_head.weight            their average, where one is kept
        rng.cpu, rng.cuda               state of the rank's random generators
    policy-001.safetensors              what rank 1 holds: master/141557760/lm_head.weight ...

All files together hold every element of every parameter once; padding is not written. A reader opens all of them and
takes the pieces that it needs, so it never holds more than its own share and one piece.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors
import torch
from torch import Tensor

from fourfold.errors import WrongState
from fourfold_trainer.checkpoint import store
from fourfold_trainer.optim.masters import Masters, Slice

MASTER: Final = "master"
STEP: Final = "step"
EMA: Final = "ema"
_RANDOM: Final = "rng."


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank holds of a model's state, on the CPU."""

    states: list[dict[str, Tensor]]
    """Of each master, flat tensors by kind: its elements, the optimizer's moments, STEP, EMA; 0 in the padding."""
    random: dict[str, Tensor]
    """State of the random generators by name; empty for a rank that was not there when they were written."""


def write(
    path: Path, masters: Masters, states: Sequence[Mapping[str, Tensor]], random: Mapping[str, Tensor], *, rank: int
) -> None:
    """Write this rank's file, durably. What all ranks share is in that of rank 0 alone.

    Args:
        path: of the file.
        masters: of the rank.
        states: of each master, by kind.
        random: states of its random generators, by name.
        rank: of this process.

    Raises:
        Unavailable: the disk refuses.
    """
    tensors = {f"{_RANDOM}{name}": state for name, state in random.items()}
    slices = [] if masters.shared and rank else masters.slices
    for piece in slices:
        for kind, value in states[piece.master].items():
            flat = value.detach().reshape(-1)
            # A count of updates is one number for all slices of a master; files hold no tensor twice: copies.
            part = flat.clone() if kind == STEP else flat[piece.offset : piece.offset + piece.count]
            tensors[f"{kind}/{piece.first}/{piece.name}"] = part.cpu()
    store.write_tensors(path, tensors)


def read(folder: Path, model: str, masters: Masters, kinds: Collection[str], *, rank: int) -> Shard:
    """Read this rank's share of what all ranks wrote, whatever their number and stage were.

    Args:
        folder: of the checkpoint.
        model: `policy` or `critic`.
        masters: of this rank.
        kinds: to read; of all but MASTER there may be none.
        rank: of this process.

    Raises:
        WrongState: a file cannot be read, or they hold another model.
    """
    paths = sorted(folder.glob(store.rank_file(model, None)))
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
        return Shard(states=states, random=files.random(store.rank_file(model, rank)))


class _Files:
    """All ranks' files of a model: what is where. Reads from the disk when asked."""

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
        """Refuse another model's state."""
        found = {name: pieces for (kind, name), pieces in self._pieces.items() if kind == MASTER}
        for name in {**sizes, **found}:
            elements = sum(count for _, count, _, _ in found.get(name, ()))
            if elements != sizes.get(name, 0):
                raise WrongState(
                    f"{folder} has {elements} elements of {name}, the model has {sizes.get(name, 0)}; start the "
                    f"trainer with the model that it was written for, or begin a new run from an exported model"
                )

    def fill(self, target: Tensor, piece: Slice, kind: str) -> int:
        """Put the elements of a slice where they belong in its master; return their number, 0 when there are none."""
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
        """Return how many updates Adam has made of a parameter."""
        for _, _, path, key in self._pieces.get((STEP, name), ()):
            with _readable(path):
                return float(self._files[path].get_tensor(key))
        return 0.0

    def random(self, name: str) -> dict[str, Tensor]:
        """Return the states of the random generators in one of the files; none when there is no such file."""
        for path, file in self._files.items():
            if path.name == name:
                with _readable(path):
                    keys = file.keys()
                    return {k.removeprefix(_RANDOM): file.get_tensor(k) for k in keys if k.startswith(_RANDOM)}
        return {}


def _read_master(files: _Files, size: int, slices: Sequence[Slice], kinds: Collection[str]) -> dict[str, Tensor]:
    """Return the state of one master, by kind; a kind that not all of its parameters have is left out."""
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
    state.setdefault(MASTER, torch.zeros(size))  # one of padding alone has no slice
    return state


class _readable:
    """Turns what a damaged file raises into one clear error."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, OSError | ValueError | safetensors.SafetensorError):
            raise WrongState(f"{self._path} cannot be read ({error}); restore another checkpoint") from None
