"""Runs one rank of groups that share rows: `python -m tests.support.sequence_ranks RANK COUNT SIZE FOLDER`.

COUNT ranks join over gloo, in groups of SIZE, each group with a row of its own. A rank writes its outputs and gradients
of case i to FOLDER/<i>-<rank>.safetensors.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import safetensors.torch

from fourfold.config import Config
from tests.support.sequence_cases import CASES, float64_alone, make_model, run


def config_of(ranks: int, size: int) -> Config:
    """Return a recipe with this number of ranks and this size of groups."""
    return Config.model_validate(
        {
            "name": "sequence",
            "steps": 1,
            "model": {"source": "none"},
            "data": {"train": {"path": "train.jsonl"}},
            "batch": {"prompts_per_step": 4, "group_size": 4},
            "sampling": {"max_new_tokens": 8},
            "trainer": {"ranks": ranks, "sequence_parallel_size": size, "step_timeout_seconds": 60},
        }
    )


def main(rank: int, count: int, size: int, folder: Path) -> None:
    """Join the ranks, run all cases, and write the results."""
    from fourfold_trainer.ranks import placement

    config = config_of(count, size)
    place = placement.place_ranks(config, critic=False)[rank]
    os.environ.update(placement.rank_environment(config, place))
    from fourfold_trainer.zero import process_groups, rendezvous_store

    process_groups.join(
        config, rank=rank, rank_count=count, gpu=place.gpu, store_address=rendezvous_store.file_rendezvous(folder)
    )
    exchange = process_groups.make_exchange(config, rank=rank)
    for index, case in enumerate(CASES):
        with float64_alone():
            found = run(case, make_model(case), exchange, seed=rank // size)
        file = folder / f"{index}-{rank}.safetensors"
        safetensors.torch.save_file({name: value.clone() for name, value in found.items()}, file)
    process_groups.leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
