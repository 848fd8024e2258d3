"""Who imports whom: the contracts in pyproject.toml, and what is really loaded where everything is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "vllm", "deepspeed", "ray"}

_LOADED = """
import importlib, json, pkgutil, sys
package, skipped = sys.argv[1], tuple(sys.argv[2:])
names = [package]
for name in names:
    if name.startswith(skipped) or name.endswith("__main__"):
        continue
    path = getattr(importlib.import_module(name), "__path__", ())
    names += [f"{name}.{child.name}" for child in pkgutil.iter_modules(path)]
print(json.dumps(sorted({m.split(".")[0] for m in sys.modules})))
"""


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--config", "pyproject.toml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=50, check=False)


def _loaded(*arguments: str) -> set[str]:
    command = [sys.executable, "-W", "ignore", "-c", _LOADED, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_contracts_hold() -> None:
    done = _lint(ROOT)
    assert done.returncode == 0, done.stdout
    assert ", 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("fourfold/rpc/server.py", "import torch", "fourfold needs no tensor library"),
        ("fourfold/rpc/server.py", "from fourfold.weights import manifest", "nn and weights are imported"),
        ("fourfold/rpc/server.py", "def f():\n    import vllm", "vLLM is imported by its engine"),
        ("fourfold/rpc/server.py", "import fourfold_trainer", "Services stand on fourfold"),
        ("fourfold_coordinator/training/loop.py", "import fourfold_rollout", "Services stand on fourfold"),
        ("fourfold_coordinator/training/loop.py", "import ray", "Ray is imported by its launcher"),
        ("fourfold_trainer/step/train_step.py", "import deepspeed", "DeepSpeed is imported by its engine"),
        ("fourfold_reward/pool.py", "import transformers", "Rewards need no tensor library"),
        ("fourfold/sandbox/enter.py", "import pydantic", "A sandboxed process starts with nothing but its sandbox"),
        ("fourfold_reward/pool.py", "import fourfold_reward.reference", "Rewards do not import the reference"),
    ],
)
def test_a_violation_breaks_its_contract(tmp_path: Path, module: str, line: str, contract: str) -> None:
    """The contracts are real: in a skeleton of the packages, one bad import breaks the one contract it should."""
    for package in (
        *("fourfold", "fourfold/nn", "fourfold/weights", "fourfold_rollout", "fourfold_trainer", "fourfold_reward"),
        *("fourfold_reward/reference", "fourfold_coordinator", "fourfold/sandbox"),
    ):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "fourfold/weights/manifest.py").write_text("")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    assert _lint(tmp_path).returncode == 0
    (tmp_path / module).parent.mkdir(exist_ok=True)
    (tmp_path / module).parent.joinpath("__init__.py").touch()
    (tmp_path / module).write_text(line + "\n")
    done = _lint(tmp_path)
    assert done.returncode != 0
    broken = [text for text in done.stdout.splitlines() if text.endswith("BROKEN")]
    assert len(broken) == 1 and broken[0].startswith(contract), done.stdout


def test_the_shared_package_loads_nothing_heavy() -> None:
    assert not _loaded("fourfold", "fourfold.nn", "fourfold.weights") & HEAVY


def test_the_coordinator_loads_nothing_heavy() -> None:
    assert not _loaded("fourfold_coordinator", "fourfold_coordinator.launch.ray") & HEAVY


def test_rewards_load_nothing_heavy() -> None:
    assert not _loaded("fourfold_reward", "fourfold_reward.reference") & HEAVY


def test_services_load_their_engine_only_when_it_starts() -> None:
    assert "vllm" not in _loaded("fourfold_rollout", "fourfold_rollout.vllm")
    assert "deepspeed" not in _loaded("fourfold_trainer", "fourfold_trainer.zero")
