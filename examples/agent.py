"""An agent of yours: sends one chat message to a rollout service's public port and prints the answer as it is sampled.

    python examples/agent.py 127.0.0.1:50060 certs/ca.pem builtin:smollm2-135m-instruct "What is 3 * 4?"

It needs `fourfold[tokenizer]`, the deployment's ca.pem, a folder with the model's tokenizer and chat template (or
builtin:NAME), and a bearer token, which is asked for, or taken from FOURFOLD_TOKEN.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import sys
import uuid
from contextlib import aclosing
from pathlib import Path

import grpc
import numpy as np
from google.protobuf.duration_pb2 import Duration

from fourfold.errors import FourfoldError
from fourfold.model import folder as model_folder
from fourfold.model.tokenizer import Tokenizer
from fourfold.rollout.client import AsyncRolloutClient
from fourfold.rollout.v1.rollout_service_pb2 import GenerateRequest, SamplingParams
from fourfold.rpc.channel import open_channel
from fourfold.security.access import ROLLOUT, Security


async def ask(channel: grpc.aio.Channel, tokenizer: Tokenizer, question: str) -> None:
    """Print the answer to one question."""
    client = AsyncRolloutClient(channel, peer="the rollout service")
    if (await client.get_info(timeout=10)).tokenizer_sha256 != tokenizer.sha256:
        sys.exit("agent: the rollout service serves a model with another tokenizer; give that model")
    request = GenerateRequest(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": question}])),
        sampling_params=SamplingParams(temperature=0.7, max_tokens=64),
        flush_interval=Duration(nanos=50_000_000),  # unset: the whole answer at once
    )
    ids, shown, version = list[int](), "", 0
    async with aclosing(client.generate(request, timeout=120)) as chunks:  # leaving early aborts the sample
        async for chunk in chunks:
            ids += np.frombuffer(chunk.token_ids, "<i4").tolist()
            text = tokenizer.decode(ids).rstrip("\ufffd")  # the bytes of half a character wait for the rest
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown, version = text, chunk.policy_version
    sys.stdout.write(f"\n[{len(ids)} tokens, sampled by policy version {version}]\n")


async def connect(target: str, authority: Path, token: str, tokenizer: Tokenizer, question: str) -> None:
    """Ask over a channel of its own."""
    async with open_channel(target, Security.for_agent(authority), server=ROLLOUT, token=token) as channel:
        await ask(channel, tokenizer, question)


def main(target: str, authority: str, model: str, question: str) -> None:
    """Read what is on this machine, then connect and ask."""
    folder = Path(model) if (Path(model) / "tokenizer.json").is_file() else model_folder.resolve(model)
    token = os.environ.get("FOURFOLD_TOKEN") or getpass.getpass("Token: ")
    asyncio.run(connect(target, Path(authority), token, Tokenizer.load(folder), question))


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit("usage: python examples/agent.py HOST:PORT CA.pem MODEL QUESTION")
    try:
        main(*sys.argv[1:])
    except FourfoldError as error:
        sys.exit(f"agent: {error}")
