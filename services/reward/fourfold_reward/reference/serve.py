"""The role `reference`: `fourfold serve reference RECIPE` runs this until it is told to stop."""

from __future__ import annotations

import asyncio
from typing import Final

from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.model import folder as model_folder
from fourfold.model.tokenizer import tokenizer_sha256
from fourfold.reference.v1 import reference_service_pb2 as pb
from fourfold.reference.v1.reference_service_pb2_grpc import add_ReferenceServiceServicer_to_server
from fourfold.service.lifecycle import ServeOptions, ServiceHost
from fourfold_reward.reference.model import ReferenceModel
from fourfold_reward.reference.servicer import MAX_CALLS, Loaded, ReferenceServicer

# Health and GetInfo, beside as many Score calls as the servicer takes.
_OTHER_CALLS: Final = 64


def main(options: ServeOptions) -> int:
    """Serve until the end; return the process's exit code."""
    return asyncio.run(serve(options))


async def serve(options: ServeOptions) -> int:
    """Load the model in a thread while health is answered, then serve it."""
    config = options.config
    host = ServiceHost(options, role=Role.ROLE_REFERENCE, max_concurrent_rpcs=MAX_CALLS + _OTHER_CALLS)
    servicer = ReferenceServicer(name=config.model.source, max_context_tokens=config.model.max_context_tokens)
    service = pb.DESCRIPTOR.services_by_name["ReferenceService"]
    host.server.add(service, add_ReferenceServiceServicer_to_server, servicer)

    def load() -> Loaded:
        folder = model_folder.resolve(config.model.source)
        sha256 = tokenizer_sha256(folder)
        model = ReferenceModel.load(
            folder,
            dtype=config.model.dtype,
            device=config.reference.device,
            tokens_per_batch=config.reference.tokens_per_batch,
            max_context_tokens=config.model.max_context_tokens,
        )
        return Loaded(model=model, tokenizer_sha256=sha256)

    async def start() -> None:
        loaded = await asyncio.to_thread(load)
        host.tokenizer_sha256 = loaded.tokenizer_sha256
        servicer.set_ready(loaded)

    host.on_drain.append(servicer.close)
    return await host.run(start=start)
