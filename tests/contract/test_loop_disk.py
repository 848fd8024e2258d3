"""A disk that is full in the middle of a run: the coordinator is a process that may write no more bytes."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Callable

from fourfold.coordinator.client import MembershipClient
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import Unavailable
from fourfold.rpc.channel import open_channel
from fourfold_coordinator.launch.run_names import ADDRESS_FILE
from tests.fakes.stage import Stage, check_books, until, watch_for


async def test_a_full_disk_is_waited_for_and_costs_no_row(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=4, retry={"service_wait_seconds": 30.0})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fourfold", "serve", "coordinator", str(stage.folder / "config.toml")),
        *("--run-dir", str(stage.folder)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    limits = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)

    async def fill_the_disk(step: int) -> None:
        if step == 3:  # no file may become longer than a byte: works without root, and with any file system
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1, limits[1]))

    try:
        stage.trainer.on_train = fill_the_disk
        await until((stage.folder / ADDRESS_FILE).exists, 20)
        stage.address = (stage.folder / ADDRESS_FILE).read_text().strip()
        for member in stage.members:
            await member.join(stage.address)
        status = await watch_for(stage, lambda status: bool(status.conditions))
        (condition,) = status.conditions
        assert condition.subject == "disk" and str(stage.folder) in condition.text
        assert "make room there" in condition.text
        assert len(status.members) == 3
        # A lease lasts longer than this test: ask for what keeps one alive.
        client = MembershipClient(open_channel(stage.address, None), peer="coordinator")
        lease = await client.register(
            member_id="reward-1",
            incarnation="f" * 32,
            role=Role.ROLE_REWARD,
            target=stage.reward.target,
            tokenizer_sha256=b"",
            timeout=2,
        )
        assert await client.keep_alive(lease.token, timeout=2) == (lease.ttl_seconds, False), "leases are renewed"
        await client.deregister(lease.token, timeout=2)
        assert (await watch_for(stage, lambda _: True)).conditions, "and the disk is still full"
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)
        _, errors = await asyncio.wait_for(process.communicate(), 20)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    assert "Traceback" not in errors.decode()
    check_books(stage)


async def test_a_checkpoint_that_waits_for_the_trainers_disk_is_shown(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=4)
    full = True

    async def refuse(step: int) -> None:
        if full:
            raise Unavailable("checkpoints/step-000002 cannot be written (No space left on device); make room")

    stage.trainer.on_saved = refuse
    await stage.start()
    status = await watch_for(stage, lambda status: bool(status.conditions))
    (condition,) = status.conditions
    assert condition.subject == "trainer"
    assert condition.text.startswith("SaveCheckpoint is asked again: ") and "No space left" in condition.text
    full = False
    await watch_for(stage, lambda status: not status.conditions)
    await stage.check_end()
