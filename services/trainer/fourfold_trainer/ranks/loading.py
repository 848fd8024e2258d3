"""Makes the models of a rank in its process."""

from __future__ import annotations

import os
from pathlib import Path

from fourfold.config import Config
from fourfold.host.imports import fast_imports
from fourfold.model import folder
from fourfold_trainer.ranks.placement import RankPlacement, rank_environment
from fourfold_trainer.ranks.rank_worker import RankWorker


def make_worker(
    config: Config, model_folder: Path, place: RankPlacement, *, store_address: str, run_dir: Path
) -> RankWorker:
    """Join the process group and load this process's models.

    Args:
        store_address: address of the process group's store, from `zero.rendezvous_store`.
        run_dir: folder of the run on this machine, for checkpoints.
    """
    os.environ.update(rank_environment(config, place))
    # Imported here, because DeepSpeed reads the environment at import. Its autotuner, which nothing here uses, would
    # import MLflow where that is installed.
    with fast_imports(without="mlflow"):
        import torch

        from fourfold_trainer.zero.models import DeepSpeedCritic, DeepSpeedPolicy, DeepSpeedScorer
        from fourfold_trainer.zero.process_groups import join, make_exchange, make_file_group

    if config.trainer.device == "cpu" or config.trainer.offload != "none":  # the optimizer then runs on the CPU
        cores = len(os.sched_getaffinity(0))
        share = max(1, cores // place.machine_ranks)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or share)
    rank, rank_count = place.rank, place.rank_count
    join(config, rank=rank, rank_count=rank_count, gpu=place.gpu, store_address=store_address)
    exchange = make_exchange(config, rank=rank)
    file_group = make_file_group(config) if place.machine_ranks < rank_count else None
    torch.manual_seed(config.seed * rank_count + rank)
    policy = critic = None
    if place.holds != "critic":
        make = DeepSpeedScorer if config.algorithm.loss.trains == "scores" else DeepSpeedPolicy
        policy = make(config, model_folder, rank=rank, rank_count=rank_count, exchange=exchange)
    if place.holds != "policy":
        source = folder.resolve(config.critic.source, key="critic.source") if config.critic.source else model_folder
        critic = DeepSpeedCritic(config, source, rank=rank, gpu=place.gpu, exchange=exchange)
    return RankWorker(config, policy, critic, rank=rank, rank_count=rank_count, run_dir=run_dir, file_group=file_group)
