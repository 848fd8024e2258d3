"""A service process for tests of the host: `python -m tests.fakes.service OPTIONS`, a reward service that sleeps."""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from fourfold import config, errors
from fourfold.coordinator.v1.membership_service_pb2 import ROLE_REWARD
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.reward.v1 import reward_service_pb2_grpc as pb_grpc
from fourfold.service import lifecycle
from fourfold.service.lifecycle import ServeOptions, ServiceHost

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
Context = grpc.aio.ServicerContext[Any, Any]


class Sleeper(pb_grpc.RewardServiceServicer):
    """Scores after the number of seconds in the prompt's text."""

    def __init__(self, host: ServiceHost) -> None:
        self._host = host

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        """Name."""
        return pb.GetInfoResponse(name="sleeper@1")

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """Sleep, or die, or block the event loop."""
        text = request.items[0].prompt_text
        if text == "fatal":
            threading.Thread(target=self._host.fatal, args=("the engine died (signal 9)",)).start()
        elif text == "block":
            say("BLOCKED")
            time.sleep(60)  # noqa: ASYNC251 - a loop that is stuck is what the test is about
        else:
            say("SCORING")
            await asyncio.sleep(float(text))
        return pb.ScoreResponse(scores=[pb.SampleScore(sample_id=request.items[0].experience.sample_id, score=1)])


def say(line: str) -> None:
    """To the test, now."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--fail", default="")
    parser.add_argument("--slow-start", type=float, default=0.0)
    parser.add_argument("--slow-drain", type=float, default=0.0)
    parser.add_argument(
        "--hasty", action="store_true", help="times of drain and registration are a quarter of the real ones"
    )
    parser.add_argument("--until", type=int)
    parser.add_argument("--forever", action="store_true")
    parser.add_argument("--stuck-thread", action="store_true")
    parser.add_argument("--certs", default="")
    parser.add_argument("--metrics-listen", default="")
    parser.add_argument("--run-dir", type=Path)
    return parser.parse_args()


def main() -> int:
    """Run the service to its end."""
    args = _arguments()
    if args.hasty:
        for name in ("_ON_DRAIN_SECONDS", "_HARD_EXIT_SECONDS"):
            setattr(lifecycle, name, getattr(lifecycle, name) / 4)
        first, later = lifecycle._UNREGISTERED_SECONDS
        vars(lifecycle)["_UNREGISTERED_SECONDS"] = (first / 4, later / 4)
    settings = config.load(RECIPE)
    if args.certs:
        settings = settings.model_copy(
            update={"security": settings.security.model_copy(update={"directory": args.certs})}
        )
    options = ServeOptions(role="reward", recipe=RECIPE, config=settings, member_id="reward-0")
    options = replace(options, listen=args.listen, coordinator=args.coordinator)
    options = replace(options, metrics_listen=args.metrics_listen, run_dir=args.run_dir)
    try:
        host = ServiceHost(options, role=ROLE_REWARD)
        host.tokenizer_sha256 = b"t" * 32
    except errors.ConfigError as error:
        sys.stderr.write(error.message + "\n")
        return 1
    service = pb.DESCRIPTOR.services_by_name["RewardService"]
    host.server.add(service, pb_grpc.add_RewardServiceServicer_to_server, Sleeper(host))

    async def start() -> None:
        if args.slow_start:
            say("STARTING")
        await asyncio.sleep(args.slow_start)
        if args.stuck_thread:
            threading.Thread(target=time.sleep, args=(60,)).start()
        if args.fail:
            raise errors.ConfigError(args.fail)

    async def drain() -> None:
        say("DRAINING")
        await asyncio.sleep(args.slow_drain)
        say("DRAINED")

    async def until() -> int:
        if args.forever:
            await asyncio.sleep(3600)
        return int(args.until)

    host.on_drain.append(drain)
    work = until() if args.forever or args.until is not None else None
    return asyncio.run(host.run(start=start, until=work))


if __name__ == "__main__":
    sys.exit(main())
