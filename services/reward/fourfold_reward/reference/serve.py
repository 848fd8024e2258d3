"""Runs the reference service: `fourfold serve reference RECIPE` loads the model, then answers calls."""

from __future__ import annotations

import asyncio

from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.model import folder as model_folder
from fourfold.model.tokenizer import check_same_vocabulary, tokenizer_sha256
from fourfold.reference.v1 import reference_service_pb2 as pb
from fourfold.reference.v1.reference_service_pb2_grpc import add_ReferenceServiceServicer_to_server
from fourfold.service.lifecycle import ServeOptions, ServiceHost
from fourfold_reward.reference.metrics_source import reference_source
from fourfold_reward.reference.model import ReferenceModel
from fourfold_reward.reference.servicer import MAX_CALLS, ReferenceServicer


def main(options: ServeOptions) -> int:
    """Serve until a signal or a fatal error; return the exit code."""
    return asyncio.run(serve(options))


async def serve(options: ServeOptions) -> int:
    """Load the model in a thread, so that health checks are answered meanwhile, then serve it."""
    config = options.config
    # Room for health checks and GetInfo besides the calls of ComputeLogprobs.
    host = ServiceHost(options, role=Role.ROLE_REFERENCE, max_concurrent_rpcs=MAX_CALLS + 64)
    servicer = ReferenceServicer(
        name=config.reference.source or config.model.source,
        max_context_tokens=config.model.max_context_tokens,
        on_failure=host.fatal,
    )
    service = pb.DESCRIPTOR.services_by_name["ReferenceService"]
    host.server.add(service, add_ReferenceServiceServicer_to_server, servicer)
    host.exporter.add(reference_source(servicer.batcher))

    def load() -> tuple[ReferenceModel, bytes]:
        folder = own = model_folder.resolve(config.model.source, config.data.chat_template)
        if source := config.reference.source:
            # It keeps its own chat template: the services exchange token ids alone.
            folder = model_folder.resolve(source, key="reference.source")
            check_same_vocabulary(own, folder, key="reference.source")
        sha256 = tokenizer_sha256(own)  # before the model: a wrong folder then fails fast
        model = ReferenceModel.load(
            folder,
            dtype=config.model.dtype,
            device=config.reference.device,
            tokens_per_batch=config.reference.tokens_per_batch,
            max_context_tokens=config.model.max_context_tokens,
            float32_logits=config.model.head_dtype == "float32",
        )
        # Models with one tokenizer may pad their vocabularies to different sizes; a student can learn only its own ids.
        model.ids_below = min(model.ids_below, model_folder.folder_shape(own).vocabulary)
        return model, sha256

    async def start() -> None:
        model, host.tokenizer_sha256 = await asyncio.to_thread(load)
        servicer.set_ready(model, tokenizer_sha256=host.tokenizer_sha256)

    host.on_drain.append(servicer.close)
    return await host.run(start=start)
