"""The docs: every snippet runs and type-checks, and the glossary and the monitoring page have every metric."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.coordinator.v1 import run_service_pb2 as run
from fourfold.coordinator.v1.run_service_pb2_grpc import add_RunServiceServicer_to_server
from fourfold.metrics import METRICS
from fourfold.model.tokenizer import tokenizer_sha256
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.codec import pack_floats
from fourfold.rpc.server import Server
from fourfold.trainer.v1 import trainer_service_pb2 as trainer
from fourfold_coordinator.reporting.run_service import RunServicer
from fourfold_coordinator.state.run_board import RunBoard
from tests.fakes.clock import FakeClock
from tests.fakes.servicers import Context, Reference, Reward, Rollout, Trainer, generated
from tests.fakes.toy import write_model
from tests.support.scrape import EXPORTED_BY_SERVICE

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/clients").glob("*.md"))
GLOSSARY = ROOT / "docs/glossary.md"
MONITORING = ROOT / "docs/monitoring.md"
UPDATE = "FOURFOLD_UPDATE_SNAPSHOT"
SNIPPET = re.compile(r"(<!-- not run by the tests.*?-->\n)?```python\n(.*?)```", re.DOTALL)


def _snippets() -> Iterator[Any]:
    for page in PAGES:
        for number, match in enumerate(SNIPPET.finditer(page.read_text()), 1):
            yield pytest.param(match[2], not match[1], id=f"{page.stem}-{number}")


class _Rollout(Rollout):
    """Answers as many samples as the request has."""

    def __init__(self, tokenizer: bytes) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    async def GetInfo(self, request: rollout.GetInfoRequest, context: Context) -> rollout.GetInfoResponse:
        return rollout.GetInfoResponse(model="toy", tokenizer_sha256=self.tokenizer)

    async def Generate(self, request: rollout.GenerateRequest, context: Context) -> Any:
        chunks = [generated(index, 17, 18, done=True) for index in range(request.sample_count or 1)]
        yield rollout.GenerateResponse(chunks=chunks)


class _Trainer(Trainer):
    """Answers the parts of a step."""

    async def ComputeLogprobs(self, request: trainer.ComputeLogprobsRequest, context: Context) -> Any:
        rows = [pack_floats(np.full(len(e.token_ids) // 4, -1, np.float32)) for e in request.experiences]
        return trainer.ComputeLogprobsResponse(logprobs=rows)

    async def ForwardBackward(self, request: trainer.ForwardBackwardRequest, context: Context) -> Any:
        rows = [pack_floats(np.zeros(len(s.experience.token_ids) // 4, np.float32)) for s in request.samples]
        return trainer.ForwardBackwardResponse(logprobs=rows)

    async def OptimStep(self, request: trainer.OptimStepRequest, context: Context) -> trainer.OptimStepResponse:
        return trainer.OptimStepResponse(step=request.step, policy_version=1)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Serve every service on one port, on a thread; return the target and a model folder."""
    folder = write_model(tmp_path_factory.mktemp("model"))
    ready, end, target = threading.Event(), threading.Event(), [""]

    async def serve() -> None:
        board = RunBoard(name="toy", step_count=4, clock=FakeClock())
        board.set_phase(run.RUN_PHASE_GENERATING)
        server = Server(listen="127.0.0.1:0", security=None)
        server.add(run.DESCRIPTOR.services_by_name["RunService"], add_RunServiceServicer_to_server, RunServicer(board))
        for servicer in (_Rollout(tokenizer_sha256(folder)), _Trainer(), Reward(), Reference()):
            server.add(*servicer.servicer())
        target[0] = await server.start()
        server.set_ready(True)
        ready.set()
        while not end.is_set():
            await asyncio.sleep(0.02)
        await server.stop(0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(20)
    yield target[0], folder
    end.set()
    thread.join(10)


@pytest.mark.parametrize(("code", "runs"), _snippets())
def test_a_snippet_runs(code: str, runs: bool, toy: tuple[str, Path]) -> None:
    target, folder = toy
    compiled = re.sub(r"127\.0\.0\.1:\d+", target, code).replace("builtin:smollm2-135m-instruct", str(folder))
    program = compile(compiled, "snippet", "exec")
    if runs:
        exec(program, {"__name__": "snippet"})


@pytest.mark.timeout(240)
def test_the_snippets_are_typed(tmp_path: Path) -> None:
    for number, snippet in enumerate(_snippets()):
        (tmp_path / f"snippet_{number}.py").write_text(snippet.values[0])
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout


def test_the_glossary_has_every_metric_with_its_meaning() -> None:
    text = GLOSSARY.read_text()
    rows = "".join(f"| `{name}` | {meaning.replace('|', chr(92) + '|')} |\n" for name, meaning in METRICS.items())
    head, rule, found = text.rpartition("| metric | unit and meaning |\n|---|---|\n")
    if os.environ.get(UPDATE):
        GLOSSARY.write_text(head + rule + rows)
    else:
        assert found == rows, f"fourfold/metrics.py changed; write the table with {UPDATE}=1"


def test_the_monitoring_page_has_every_exported_metric() -> None:
    rows = "".join(
        f"| {service} | `{e.name}` | {e.kind} | {', '.join(f'`{label}`' for label in e.labels)} | {e.help} |\n"
        for service, exported in EXPORTED_BY_SERVICE.items()
        for e in exported
    )
    text = MONITORING.read_text()
    head, rule, found = text.rpartition("| service | metric | type | labels | meaning |\n|---|---|---|---|---|\n")
    if os.environ.get(UPDATE):
        MONITORING.write_text(head + rule + rows)
    else:
        assert found == rows, f"an exported metric changed; write the table with {UPDATE}=1"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}
    assert {page for page in pages if page not in navigation} == set()
