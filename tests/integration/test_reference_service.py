"""The reference service as a process: it loads, answers through its client, and drains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fourfold.reference.client import AsyncReferenceClient
from fourfold.rpc.channel import open_channel
from fourfold.sample import Sample, VersionSpan
from tests.support.scrape import check_exported, discovered, http, parse, value

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

RECIPE = """
name = "reference"
steps = 1
model = {{ source = "{folder}", max_context_tokens = 64 }}
data = {{ train = {{ path = "none.jsonl" }} }}
sampling = {{ max_new_tokens = 4 }}
batch = {{ prompts_per_step = 1, group_size = 2 }}
algorithm = {{ kl = {{ coef = 0.1 }} }}
metrics = {{ endpoint = true }}
"""
MAIN = """
import sys
from pathlib import Path
from fourfold.config import load
from fourfold.service.lifecycle import ServeOptions
from fourfold_reward.reference.serve import main
recipe = Path(sys.argv[1])
options = ServeOptions(
    role="reference", recipe=recipe, config=load(recipe), member_id="reference-0", run_dir=recipe.parent
)
sys.exit(main(options))
"""


def start(folder: Path, model: str) -> subprocess.Popen[str]:
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(folder=model))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, str(recipe)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def sample(sample_id: str, count: int) -> Sample:
    mask = np.arange(count) >= count // 2
    return Sample(
        sample_id=sample_id,
        group_id="g",
        token_ids=np.arange(count, dtype=np.int32) * 7 % 512,
        behavior_logprobs=np.where(mask, -1, np.nan).astype(np.float32),
        action_mask=mask,
        loss_mask=mask,
        version_spans=(
            VersionSpan(policy_version=-1, token_count=count // 2),
            VersionSpan(policy_version=0, token_count=count - count // 2),
        ),
        temperature=0.8,
    )


@pytest.mark.slow
async def test_service_loads_answers_and_drains(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("qwen2")
    with start(tmp_path, str(model)) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline().split()
            assert ready[:1] == ["READY"]
            channel = open_channel(ready[1], None)
            client = AsyncReferenceClient(channel, peer="reference-0")
            info = await client.get_info(timeout=10)
            assert (info.model, info.vocabulary_size) == (str(model), 512)
            rows = await client.compute_logprobs([sample("a", 20), sample("b", 64)], timeout=30)
            assert [len(row) for row in rows] == [20, 64]
            assert all(np.isnan(row[0]) and (row[1:] < 0).all() for row in rows)
            families = parse((await http(discovered(tmp_path, "reference-0")))[2])
            check_exported(families, "reference")
            assert value(families, "fourfold_reference_samples_total") == 2
            assert value(families, "fourfold_reference_tokens_total") == 84
            assert value(families, "fourfold_reference_batch_seconds_count") == 1
            await channel.close()
            process.send_signal(signal.SIGTERM)
            _, text = process.communicate(timeout=10)
            assert process.returncode == 0, text
        finally:
            process.kill()


@pytest.mark.slow
def test_missing_model_folder_is_one_clear_line(tmp_path: Path) -> None:
    with start(tmp_path, str(tmp_path / "nowhere")) as process:
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "READY" not in output
    assert "nowhere" in errors.splitlines()[-1]
    assert "Traceback" not in errors
