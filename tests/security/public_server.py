"""A process with only a public port, whose memory and file descriptors the tests measure.

Usage: python -m tests.security.public_server CERTIFICATES
"""

from __future__ import annotations

import asyncio
import sys

from fourfold.config import SecurityConfig
from fourfold.rpc.server import Server
from fourfold.security.access import Security
from fourfold.security.principal import Principal
from tests.fakes.servicers import Rollout


async def main(folder: str) -> None:
    """Serve until standard input ends."""
    config = SecurityConfig(directory=folder, tokens_file=f"{folder}/tokens.txt")
    security = Security.load(config, Principal("rollout", "rollout-0"))
    server = Server(listen="127.0.0.1:0", security=security, public=True)
    server.add(*Rollout(hang=True).servicer())
    sys.stdout.write(f"READY {await server.start()}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


asyncio.run(main(sys.argv[1]))
