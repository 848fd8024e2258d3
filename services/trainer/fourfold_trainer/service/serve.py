"""Runs the process of `fourfold serve trainer`: gRPC in the main thread, the engine in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Final

from fourfold.coordinator.v1.membership_service_pb2 import ROLE_TRAINER
from fourfold.host.network import NCCL_VARIABLE, nccl_interface
from fourfold.host.process import NOTICE
from fourfold.model import folder as model_folder
from fourfold.model.tokenizer import tokenizer_sha256
from fourfold.plan.models import check_sequence_parallel
from fourfold.plan.weight_update import lora_update
from fourfold.service.lifecycle import ServeOptions, ServiceHost
from fourfold.trainer.v1 import trainer_service_pb2 as pb
from fourfold.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight
from fourfold.trainer.v1 import trainer_weight_service_pb2_grpc as weight_grpc
from fourfold_trainer.ranks import holder
from fourfold_trainer.ranks.distributed_engine import DistributedEngine
from fourfold_trainer.service.metrics_source import trainer_source
from fourfold_trainer.service.rank_rendezvous import RankRendezvous, check_ranks
from fourfold_trainer.service.servicer import TrainerServicer
from fourfold_trainer.service.state import TrainerCore
from fourfold_trainer.service.weight_servicer import TrainerWeightServicer

_log: Final = logging.getLogger("fourfold.trainer")


def main(options: ServeOptions) -> int:
    """Serve until the end; return the exit code."""
    if options.ranks is not None:
        check_ranks(options)
        if options.ranks.start > 0:
            return holder.main(options)
    environment = dict(os.environ)
    code, point = asyncio.run(_serve(options))
    # Exit without the interpreter's shutdown: the engine thread may be in a collective that never returns.
    sys.stdout.flush()
    sys.stderr.flush()
    if point is not None and point.begins_again():
        point.replace_program(environment)
    os._exit(code)


async def _serve(options: ServeOptions) -> tuple[int, RankRendezvous | None]:
    """Serve until the end; return the exit code, and the rendezvous of a trainer on several machines."""
    config = options.config
    run_dir = options.make_folder().absolute()
    host = ServiceHost(options, role=ROLE_TRAINER)
    if config.trainer.device == "cuda":  # engines on other machines get weights by NCCL
        os.environ[NCCL_VARIABLE] = nccl_interface(options.host, options.interface)
    point = (
        None if options.ranks is None or len(options.ranks) == config.trainer.ranks else RankRendezvous(options, host)
    )
    loop = asyncio.get_running_loop()

    def make_engine() -> DistributedEngine:
        folder = model_folder.resolve(config.model.source, config.data.chat_template)
        check_sequence_parallel(config)
        if update := lora_update(config, model_folder.shape(config.model.source)):
            _log.info("Weight updates chosen: %s", update)
        servicer.tokenizer_sha256 = host.tokenizer_sha256 = tokenizer_sha256(folder)
        others = None if point is None else point.gather(folder, loop)
        count = len(options.ranks or range(config.trainer.ranks)) if others is None else others.machines[-1].stop
        # Everything in this process has the ranks that are there; the recipe of the run keeps its own.
        core.config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"ranks": count})})
        return DistributedEngine(
            core.config, folder, run_dir=run_dir, member_id=options.member_id, on_death=host.fatal, others=others
        )

    core = TrainerCore(config, run_dir=run_dir, make_engine=make_engine, fatal=point.fail if point else host.fatal)
    servicer = TrainerServicer(core)
    host.server.add(
        pb.DESCRIPTOR.services_by_name["TrainerService"],
        pb_grpc.add_TrainerServiceServicer_to_server,
        servicer,
    )
    host.server.add(
        weight.DESCRIPTOR.services_by_name["TrainerWeightService"],
        weight_grpc.add_TrainerWeightServiceServicer_to_server,
        TrainerWeightServicer(core),
    )
    host.exporter.add(trainer_source(core))
    host.on_signal.append(core.save_before_leaving)
    host.on_drain.append(core.stop)
    if point is not None:
        core.on_checkpoint = point.on_checkpoint
        point.servicer.on_notice = core.save_before_leaving
    saving = set[asyncio.Task[None]]()  # a loop keeps no reference to its tasks
    loop.add_signal_handler(NOTICE, lambda: saving.add(loop.create_task(core.save_before_leaving())))
    return await host.run(start=core.start), point
