"""The examples in other languages, built as their READMEs say, against the real servers and a real engine."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from fourfold.cli import main as cli_main
from fourfold.config import SecurityConfig
from fourfold.errors import Overloaded, Unavailable
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.server import Server
from fourfold.security import certs
from fourfold.security.access import Security
from fourfold.security.principal import Principal
from tests.fakes.agent_service import RUN, AgentGateway
from tests.fakes.servicers import Rollout, generated
from tests.support.rollout_process import Service, start

# Slow: `npm install`, and the build of gRPC for Go, take up to two minutes.
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
# Where Debian's packages put Go sources.
GO_PACKAGES = Path(os.environ.get("FOURFOLD_TEST_GO_PACKAGES", "/usr/share/gocode"))
Command = Callable[[str], list[str]]


def _run(words: list[str], cwd: Path, seconds: float, env: Mapping[str, str]) -> str:
    done = subprocess.run(
        words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, f"{words} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def _copy(language: str, folder: Path, name: str = "") -> Path:
    copy = folder / (name or language)
    ignored = shutil.ignore_patterns("node_modules", "dist", "protos", "gen", "package-lock.json")
    shutil.copytree(ROOT / "examples" / language, copy, ignore=ignored)
    assert cli_main.main(["proto", str(copy / "protos")]) == 0
    return copy


def _typescript(folder: Path) -> tuple[Path, Command]:
    if not shutil.which("npm"):
        pytest.skip("npm is not installed; install Node 20 to test examples/typescript")
    copy = _copy("typescript", folder)
    _run(["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"], copy, 180, os.environ)
    _run(["npm", "run", "build"], copy, 120, os.environ)
    return copy, lambda program: ["node", f"dist/{program}.js"]


def _go(folder: Path) -> tuple[Path, Command]:
    go = shutil.which("go")
    if not go:
        pytest.skip("go is not installed; install Go 1.24 to test examples/go")
    copy = _copy("go", folder / "src", name="fourfold")
    env = {**os.environ, "GOBIN": str(copy / "bin"), "GOTOOLCHAIN": "local"}
    plugins = ["google.golang.org/protobuf/cmd/protoc-gen-go", "google.golang.org/grpc/cmd/protoc-gen-go-grpc"]
    if (GO_PACKAGES / "src/google.golang.org/grpc").is_dir():
        env |= {"GO111MODULE": "off", "GOPATH": f"{folder}:{GO_PACKAGES}"}
        _run([go, "build", "-o", "bin/", *plugins], copy, 300, env)
    else:
        versions = re.findall(r"google\.golang\.org/\S+@\S+", (copy / "README.md").read_text())
        try:
            _run([go, "install", *versions], copy, 300, env)
        except AssertionError as error:
            if "dial tcp" not in str(error):
                raise
            pytest.skip(
                "Go modules cannot be downloaded; install golang-google-{grpc,genproto}-dev to test examples/go"
            )
        _run([go, "mod", "tidy"], copy, 300, env)
    options = [f"--{plugin}_{kind}" for plugin in ("go", "go-grpc") for kind in ("out=.", "opt=module=fourfold")]
    options += [f"--plugin=bin/{plugin.rpartition('/')[2]}" for plugin in plugins]
    protos = [str(path) for name in ("agent", "rollout", "types") for path in copy.glob(f"protos/fourfold/{name}/v1/*")]
    _run([sys.executable, "-m", "grpc_tools.protoc", "-I", str(copy / "protos"), *options, *protos], copy, 60, env)
    _run([go, "build", "-o", "bin/", "fourfold/cmd/sample", "fourfold/cmd/agent"], copy, 300, env)
    return copy, lambda program: [f"bin/{program}"]


BUILDS = {"typescript": _typescript, "go": _go}


@pytest.fixture(scope="module", params=list(BUILDS))
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Command]:
    """Return the folder of an example that is built, and the command of each of its programs."""
    return BUILDS[request.param](tmp_path_factory.mktemp("example"))


async def _call(example: tuple[Path, Command], program: str, *words: str, **env: str) -> str:
    folder, command = example
    return await asyncio.to_thread(_run, [*command(program), *words], folder, 60, {**os.environ, **env})


async def test_an_agent_plays_every_task_once_through_every_fault_that_may_be_repeated(
    example: tuple[Path, Command],
) -> None:
    gateway, server = AgentGateway(30), Server(listen="127.0.0.1:0", security=None, public=True)
    server.add(*gateway.servicer())
    output = await _call(example, "agent", await server.start())
    await server.stop(0)
    assert all(gateway.faults[kind] > 1 for kind in ("no task in time", "overloaded", "broken stream", "lost response"))
    assert gateway.rewards == {task: float(a % 2 == 0) for task, (a, _) in gateway.tasks.items()}
    assert gateway.abandoned == []
    assert output.splitlines() == [f"model toy, run {RUN}", "30 tasks, mean reward 0.500"]


class _Busy(Rollout):
    """Refuses the first two calls, and breaks the third one after a token."""

    def __init__(self) -> None:
        super().__init__(generated(0, 17, 18, version=3), generated(0, 300_000, version=4, done=True))
        self.calls: list[rollout.GenerateRequest] = []

    async def Generate(self, request, context):  # type: ignore[no-untyped-def]  # as of Rollout
        self.calls.append(request)
        if len(self.calls) == 1:
            raise Overloaded("too many samples", retry_after=0.05)
        if len(self.calls) == 2:
            raise Unavailable("the engine is asleep")
        async for response in super().Generate(request, context):
            yield response
            if len(self.calls) == 4:
                raise Unavailable("the engine died")


async def test_sampling_repeats_a_refused_call_and_never_a_begun_one(
    example: tuple[Path, Command], tmp_path: Path
) -> None:
    token = certs.make(tmp_path / "certs", [], [certs.parse_member("rollout-0")])
    files = SecurityConfig(directory=str(tmp_path / "certs"), tokens_file=str(tmp_path / "certs/tokens.txt"))
    security, servicer = Security.load(files, Principal("rollout", "rollout-0")), _Busy()
    server = Server(listen="127.0.0.1:0", security=security, public=True)
    server.add(*servicer.servicer())
    target, ca = await server.start(), str(tmp_path / "certs/ca.pem")
    output = await _call(example, "sample", target, "1,2,3", FOURFOLD_CA=ca, FOURFOLD_TOKEN=token)
    tokens = ["version 3: 17 18", "version 4: 300000"]
    assert output.splitlines()[1:] == [*tokens, "3 tokens, log-probability -1.500, FINISH_REASON_STOP"]
    assert len(servicer.calls) == 3 and len({call.request_id for call in servicer.calls}) == 3
    with pytest.raises(AssertionError, match=r"sample: UNAVAILABLE: the engine died"):
        await _call(example, "sample", target, "1,2,3", FOURFOLD_CA=ca, FOURFOLD_TOKEN=token)
    assert len(servicer.calls) == 4
    with pytest.raises(AssertionError, match=r"sample: UNAUTHENTICATED: unknown bearer token"):
        await _call(example, "sample", target, "1,2,3", FOURFOLD_CA=ca, FOURFOLD_TOKEN="x" * 43)
    await server.stop(0)


@pytest.fixture(scope="module")
def service(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = start(tiny_model("qwen2"), tmp_path_factory.mktemp("rollout"))
    yield running
    running.close()


async def test_tokens_of_a_real_engine_arrive_as_they_are_sampled(
    example: tuple[Path, Command], service: Service
) -> None:
    output = await _call(example, "sample", service.public, "1,2,3")
    chunks = re.findall(r"^version 0: ([0-9 ]+)$", output, re.MULTILINE)
    ids = [int(word) for chunk in chunks for word in chunk.split()]
    assert 1 <= len(ids) <= 16 and all(0 <= token < 512 for token in ids)
    assert re.search(rf"^{len(ids)} tokens, log-probability -[0-9.]+, FINISH_REASON_(STOP|LENGTH)$", output, re.M)
