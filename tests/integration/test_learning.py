"""Every preset raises the reward of a tiny model, and so does LoRA; see `tests/support/learning_driver.py`.

Presets with the name of another program have losses and advantages of the others, with its constants.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fourfold.config import PRESETS
from tests.support.fork_server import run_modules
from tests.support.learning_driver import LORA, has_learned

OTHER_PROGRAMS = ("openrlhf-", "verl-", "trl-", "prime-")
RUNS = [*(name for name in PRESETS if not name.startswith(OTHER_PROGRAMS)), f"grpo{LORA}"]

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def curves(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("learning")
    model = tiny_model("llama", 0, "float32")
    run_modules([("tests.support.learning_driver", str(model), str(out), *RUNS)], out / "driver.log", seconds=850)
    return out


@pytest.mark.parametrize("preset", RUNS)
def test_a_preset_raises_the_reward(curves: Path, preset: str) -> None:
    rewards = json.loads((curves / f"{preset}.json").read_text())["rewards"]
    assert 0.4 < rewards[0] < 0.6  # of a random model
    assert has_learned(rewards), rewards
