"""Tests the GPUs that `fourfold run` gives to its services, which print what they see. NVML is a fake."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fourfold import config as configuration
from fourfold.cli import main as cli_main
from fourfold.errors import ConfigError
from fourfold.host.process import Command
from fourfold_coordinator.cli import chat
from fourfold_coordinator.cli.run import RunCommand, make_launcher
from fourfold_coordinator.launch import ray
from fourfold_coordinator.launch.launcher import LocalLauncher, ServiceSpec
from tests.fakes.nvml import pynvml

ROOT = Path(__file__).parents[3]
COLOCATED = ROOT / "recipes" / "colocated_gpu.toml"  # 8 GiB of KV cache on each of two GPUs
SHOW = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES', 'all'), os.environ.get('CUDA_DEVICE_ORDER'))"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two large GPUs, and one for a display."""
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.setenv("FAKE_GPUS", "H200 141, H200 141, T400 4")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("gpus", [{}, {"trainer-0": ("0", "2")}])
def test_a_local_service_sees_its_own_gpus_alone(gpus: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    launcher = LocalLauncher(run_dir=tmp_path, gpus=gpus)
    names = ("reward-0", "trainer-0")
    for name in names:
        service = ServiceSpec(role=name.partition("-")[0], name=name)
        launcher.start(service, Command(name=name, argv=(sys.executable, "-c", SHOW)))
    died, end = 0, time.monotonic() + 30
    while died < len(names) and time.monotonic() < end:
        died += len(launcher.deaths())
        time.sleep(0.02)
    launcher.stop()
    seen = {name: (tmp_path / "logs" / f"{name}.log").read_text().rstrip("\n") for name in names}
    assert seen == {name: f"{','.join(gpus.get(name, ()))} PCI_BUS_ID" for name in names}


@pytest.mark.parametrize("named", ["0,1", "GPU-0aaa,GPU-1", None])
def test_a_gpu_that_no_service_gets_may_be_small(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert isinstance(launcher(), LocalLauncher)


def test_a_gpu_that_is_too_small_is_refused_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert cli_main.main(["run", str(COLOCATED)]) == 1
    assert "of weights, gradients, optimizer and KV cache, and has 4.0; lower rollout" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", 'security.directory="certs"'], "certs/ca.pem"),
        (["--listen", "0.0.0.0:0"], "--listen 0.0.0.0:0: without TLS the coordinator listens on loopback only"),
        (["--listen", "50050"], "'50050' is not an address; give HOST:PORT"),
        (["--set", 'view.public_listen="0.0.0.0:8441"'], 'view.public_listen = "0.0.0.0:8441" is beyond loopback'),
    ],
)
def test_missing_certificates_are_named_before_a_folder_is_made(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli_main.main(["run", str(COLOCATED), *words]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_may_be_too_small_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was told before the folder was made, and again by the launcher."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE_GPUS", "A 12, B 12")
    monkeypatch.setattr(RunCommand, "execute", lambda self: 0)
    assert cli_main.main(["run", str(COLOCATED), "--set", 'model.source="builtin:smollm2-135m-instruct"']) == 0
    assert capsys.readouterr().err.count("it may run out of memory") == 1


def test_on_ray_the_same_is_refused_when_it_says_which_gpus_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(ray, "RayLauncher", lambda services, **options: given.update(options))
    launcher("ray")
    given["check_gpu"](141 << 30)
    assert capsys.readouterr().err == ""
    given["check_gpu"](12 << 30)
    assert "16.8 GiB with full micro-batches, and has 12.0: it may run out of memory" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"placement.colocated = true: while sampling .* and has 4.0"):
        given["check_gpu"](4 << 30)


def launcher(kind: str = "local") -> object:
    words = argparse.Namespace(launcher=kind, ray_address="", listen="127.0.0.1:0")
    return make_launcher(words, configuration.load(COLOCATED), Path("run"))


@pytest.mark.parametrize(("named", "gpus"), [("1", 1), ("", 0)])
def test_an_engine_to_chat_with_takes_a_gpu_that_it_may_use(
    named: str, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    (tmp_path / "config.json").write_text("{}")
    assert chat._recipe(tmp_path, max_tokens=8, max_context=64).rollout.gpus_per_replica == gpus
