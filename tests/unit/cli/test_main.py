"""The command line: its imports, its errors and its exit codes."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from fourfold.cli import main as cli_main
from fourfold.coordinator.v1 import membership_service_pb2 as pb
from fourfold.coordinator.v1 import membership_service_pb2_grpc as pb_grpc
from fourfold.host import hardware
from fourfold.install import install_command
from fourfold.rpc.server import Server
from fourfold.service.lifecycle import ServeOptions

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "recipes" / "quickstart.toml"
HEAVY = ("torch", "grpc", "numpy", "transformers", "vllm", "deepspeed", "ray", "reasoning_gym", "rich")


def start(*words: str, code: str = "") -> subprocess.CompletedProcess[str]:
    argv = ["-c", code] if code else ["-m", "fourfold", *words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=30, cwd=ROOT, env=env)


@pytest.mark.parametrize("words", [["--help"], ["doctor"], ["plan", str(QUICKSTART), "--skip-checks"]])
def test_light_commands_import_nothing_heavy(words: list[str], record_property: Any) -> None:
    code = (
        "import sys, fourfold.cli.main\n"
        f"fourfold.cli.main.main({words!r})\n"
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    began = time.perf_counter()
    done = start(code=code)
    record_property("seconds", round(time.perf_counter() - began, 3))
    assert done.stderr.splitlines()[-1] == "HEAVY []", done.stderr


def test_without_a_command_the_overview_is_shown_as_a_usage_error() -> None:
    done = start()
    assert done.returncode == 2
    assert all(f"  {name} " in done.stdout for name in ("run", "serve", "plan", "doctor", "certs", "chat", "watch"))


def test_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["plna"]) == 2
    assert "did you mean `plan`?" in capsys.readouterr().err


def test_no_command_reaches_this_machine_through_a_proxy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "corp.example")
    assert cli_main.main(["--version"]) == 0
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "corp.example,localhost,127.0.0.1,::1"


def test_wrong_usage_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli_main.main(["plan"])
    assert error.value.code == 2
    assert cli_main.main(["serve", "rollout"]) == 2
    assert "the recipe is missing" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["coordinator", "trainer"])
def test_no_service_starts_without_the_number_of_steps(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["serve", role, str(QUICKSTART.with_name("sft.toml"))]) == 1
    assert "sft.toml: data.passes = 1, and services need the number of steps; start" in capsys.readouterr().err


def test_service_that_is_not_installed_names_its_distribution(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    assert cli_main.main(["serve", "trainer", str(QUICKSTART)]) == 1
    assert f"`trainer` is not installed here; {install_command('fourfold-trainer')}" in capsys.readouterr().err
    for words in (["run", str(QUICKSTART)], ["reward", "list", "runs/demo"]):
        assert cli_main.main(words) == 1
        assert install_command("fourfold-coordinator") in capsys.readouterr().err


@pytest.mark.parametrize("name", ["certs", "conformance", "import"])
def test_command_that_is_not_installed_names_its_distribution(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    assert cli_main.main([name, "x"]) == 1
    assert f"`{name}` is not installed here; {install_command('fourfold-tools')}" in capsys.readouterr().err


def test_service_without_its_libraries_names_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Entry:
        def load(self) -> object:
            raise ModuleNotFoundError("No module named 'vllm'", name="vllm")

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: (Entry(),))
    for gpus, extra in (([], "cpu"), ([hardware.Gpu(id="0", name="H100")], "gpu")):
        monkeypatch.setattr(hardware, "machine_gpus", lambda found=gpus: found)
        assert cli_main.main(["serve", "rollout", str(QUICKSTART)]) == 1
        text = f"needs the module 'vllm', which is not installed; {install_command(f'fourfold-rollout[{extra}]')}\n"
        assert text in capsys.readouterr().err


@pytest.mark.parametrize(("missing", "package"), [("fourfold_reward.pool", "fourfold-reward"), ("torch", "torch")])
def test_a_command_names_the_package_that_is_missing(
    missing: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    top = missing.partition(".")[0]
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == top else find(name, *rest))

    class Command:
        def add_arguments(self, parser: object) -> None:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    class Entry:
        def load(self) -> object:
            return Command()

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: (Entry(),))
    assert cli_main.main(["bench", "rollout"]) == 1
    text = f"`bench` needs the module {top!r}, which is not installed; {install_command(package)}"
    assert text in capsys.readouterr().err


_EDITABLE = '{"url": "file://ROOT", "dir_info": {"editable": true}}'


@pytest.mark.parametrize(
    ("requirement", "origin", "shown"),
    [
        ("fourfold-coordinator[view]", _EDITABLE, "-e 'services/coordinator[view]'"),
        ("fourfold-bench", _EDITABLE, "-e ./benchmarks"),
        ("fourfold-tools", _EDITABLE, "-e ./tools"),
        ("fourfold[hub]", _EDITABLE, "-e '.[hub]'"),
        ("fourfold-trainer[lora]", '{"url": "file://ROOT", "dir_info": {}}', "'services/trainer[lora]'"),
        ("liger-kernel>=0.8", _EDITABLE, "'liger-kernel>=0.8'"),
        ("fourfold-bench", _EDITABLE.replace("ROOT", "/no/such"), "fourfold-bench"),
        ("fourfold-bench", '{"url": "file:///a.whl", "archive_info": {}}', "fourfold-bench"),
        ("fourfold-bench", None, "fourfold-bench"),
    ],
)
def test_hints_name_the_checkout_that_is_installed(
    requirement: str, origin: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Distribution:
        def __init__(self, direct_url: str | None) -> None:
            self._direct_url = direct_url

        def read_text(self, name: str) -> str | None:
            return self._direct_url

    installed = Distribution(origin and origin.replace("ROOT", str(ROOT)))
    in_working_directory = Distribution(None)  # fourfold.egg-info, with `python -m` in the checkout
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [in_working_directory, installed])
    assert install_command(requirement).endswith(f"pip install {shown}")


def test_serve_hands_its_arguments_to_the_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "runs" / "quickstart"
    run_dir.mkdir(parents=True)
    (run_dir / "config.toml").write_text('[data]\ndate = "2020-02-03"\n')
    seen: list[ServeOptions] = []

    class Entry:
        def load(self) -> object:
            def service(options: ServeOptions) -> int:
                seen.append(options)
                return 7

            return service

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: (Entry(),))
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    words = ["--listen", "127.0.0.1:7001", "--coordinator", "127.0.0.1:7000", "--member-id", "reward-3"]
    assert cli_main.main(["serve", "reward", str(QUICKSTART), *words, "--advertise", "localhost"]) == 7
    assert cli_main.main(["serve", "trainer", str(QUICKSTART), "--run-dir", "/tmp/x"]) == 7
    assert cli_main.main(["serve", "coordinator", str(QUICKSTART)]) == 7
    assert (os.environ["TORCH_CPP_LOG_LEVEL"], os.environ["OMP_WAIT_POLICY"]) == ("ERROR", "ACTIVE"), (
        "the user's counts"
    )
    reward, trainer, coordinator = seen
    assert (reward.role, reward.member_id, reward.listen) == ("reward", "reward-3", "127.0.0.1:7001")
    assert (reward.coordinator, reward.advertise, reward.run_dir) == ("127.0.0.1:7000", "localhost", None)
    assert reward.config.name == "quickstart"
    assert (trainer.member_id, trainer.run_dir, trainer.listen) == ("trainer-0", Path("/tmp/x"), "127.0.0.1:0")
    assert coordinator.run_dir == Path("runs/quickstart")
    dates = [options.config.data.date[:10] for options in seen]
    assert dates[0] == dates[2] == "2020-02-03" < dates[1], "that of the run, or now"


@pytest.mark.parametrize(("role", "first"), [("rollout", str(Path(sys.executable).parent)), ("coordinator", "/bin")])
def test_the_coordinator_keeps_the_path_of_its_user(role: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    monkeypatch.setenv("PATH", "/bin")
    assert cli_main.main(["serve", role, str(QUICKSTART)]) == 1  # the service is not installed
    assert os.environ["PATH"].split(os.pathsep)[0] == first


def test_built_in_verifiers_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["serve", "reward", "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"exact_match", "last_number", "math_verify"} <= set(names)
    assert cli_main.main(["serve", "trainer", "--list"]) == 2


def test_certs_makes_files(tmp_path: Path) -> None:
    assert cli_main.main(["certs", str(tmp_path / "certs"), "--host", "node-7"]) == 0
    assert (tmp_path / "certs" / "ca.pem").is_file()
    assert cli_main.main(["certs", str(tmp_path / "certs")]) == 1  # nothing is overwritten


def test_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_main, "_dispatch", interrupted)
    assert cli_main.main(["plan"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [["plan", "--skip-checks", str(QUICKSTART)], ["plan", "--help"]])
def test_a_closed_pipe_is_no_error(words: list[str]) -> None:
    """As with `fourfold plan RECIPE | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    words = ["env", "-u", "PYTHONUNBUFFERED", sys.executable, "-m", "fourfold", *words]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=50, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_disk_is_no_error_of_a_program_without_buffers() -> None:
    command = ["env", "PYTHONUNBUFFERED=1", "sh", "-c", 'exec "$0" -m fourfold --version > /dev/full', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    text = "fourfold: the output cannot be written (No space left on device)\n"
    assert (done.returncode, done.stderr) == (1, text)


@pytest.mark.parametrize(
    ("words", "closed", "code", "text"),
    [
        (["new", "x.toml"], "<&-", 1, "fourfold: --data is missing: the file or folder with the training prompts\n"),
        (["plan", "--skip-checks", str(QUICKSTART)], ">&-", 0, ""),
        (["plan", "absent.toml"], "2>&-", 1, ""),
        (["plan", "--skip-checks", str(QUICKSTART)], ">/dev/full", 1, "fourfold: the output cannot be written (No "
         "space left on device)\n"),
    ],
)  # fmt: skip
def test_a_closed_or_full_standard_file_is_no_error_of_the_program(
    words: list[str], closed: str, code: int, text: str, tmp_path: Path
) -> None:
    command = [
        "env",
        "-u",
        "PYTHONUNBUFFERED",
        "sh",
        "-c",
        f'exec "$0" "$@" {closed}',
        sys.executable,
        "-m",
        "fourfold",
    ]
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=50, check=False, cwd=tmp_path, input=""
    )
    assert (done.returncode, done.stderr) == (code, text)


async def test_a_service_is_live_before_it_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(listen="127.0.0.1:0", security=None)
    server.add(
        pb.DESCRIPTOR.services_by_name["MembershipService"],
        pb_grpc.add_MembershipServiceServicer_to_server,
        cast(Any, pb_grpc.MembershipServiceServicer)(),
    )
    target = await server.start()
    words = ["health", "coordinator", str(QUICKSTART), target]
    try:
        assert await asyncio.to_thread(cli_main.main, [*words, "--live"]) == 0
        assert await asyncio.to_thread(cli_main.main, words) == 1
        assert f"coordinator at {target} is NOT_SERVING" in capsys.readouterr().err
        server.set_ready(True)
        async with asyncio.timeout(5):  # the server tells its health in a task of its own
            while await asyncio.to_thread(cli_main.main, words):
                await asyncio.sleep(0.05)
    finally:
        await server.stop(0.1)
    assert await asyncio.to_thread(cli_main.main, words) == 1
