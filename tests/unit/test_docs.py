"""The docs: every snippet runs and type-checks, and what the pages quote is in the code."""

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

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

import fourfold
from fourfold.agent.v1 import agent_service_pb2 as agent
from fourfold.bounds import MAX_NUMBER, MAX_SAMPLES_PER_CALL
from fourfold.config.agents import GatewayConfig
from fourfold.contract import DESCRIPTOR_SET, PROTO_DIR
from fourfold.coordinator.v1 import run_service_pb2 as run
from fourfold.coordinator.v1 import scorer_service_pb2 as scorers
from fourfold.coordinator.v1.run_service_pb2_grpc import add_RunServiceServicer_to_server
from fourfold.coordinator.v1.scorer_service_pb2_grpc import (
    ScorerServiceServicer,
    add_ScorerServiceServicer_to_server,
)
from fourfold.errors import BY_CODE, WrongState
from fourfold.model.tokenizer import tokenizer_sha256
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc import interceptors
from fourfold.rpc.channel import MAX_MESSAGE_BYTES, PUBLIC_SERVER_OPTIONS, RETRIED_METHODS
from fourfold.rpc.codec import ID_PATTERN, pack_floats
from fourfold.rpc.limits import (
    AGENT_LIMITS,
    MAX_WATCHES,
    MAX_WATCHES_PER_AGENT,
    MAX_WATCHES_PER_PRINCIPAL,
    MEMBER_LIMITS,
    is_watch,
)
from fourfold.rpc.server import Server
from fourfold.rpc.status import MAX_RETRY_SECONDS
from fourfold.security.access import POLICY, PUBLIC_SERVICES
from fourfold.security.tokens import SCOPES
from fourfold.service import membership
from fourfold.trainer.v1 import trainer_service_pb2 as trainer
from fourfold_coordinator.reporting.run_service import RunServicer
from fourfold_coordinator.routing import registry
from fourfold_coordinator.state.run_board import RunBoard
from fourfold_gateway.store import StoreFull
from fourfold_reward.reference.servicer import MAX_REQUEST_BYTES as REFERENCE_BYTES
from fourfold_reward.servicer import MAX_REQUEST_BYTES as SCORE_BYTES
from fourfold_rollout.generate import admission
from tests.fakes.agent_service import AgentGateway
from tests.fakes.clock import FakeClock
from tests.fakes.servicers import Context, Reference, Reward, Rollout, Trainer, generated
from tests.fakes.toy import write_model
from tests.support.scrape import EXPORTED_BY_SERVICE

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/clients").glob("*.md"))
CONTRACT = ROOT / "docs/contract.md"
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


class _Scorers(ScorerServiceServicer):
    """A run with one scorer, whose shadow agrees with it."""

    async def ListScorers(self, request: scorers.ListScorersRequest, context: Context) -> scorers.ListScorersResponse:
        agreement = scorers.Agreement(samples=2, rank_correlation=1.0)
        return scorers.ListScorersResponse(scorers=[scorers.Scorer(name="reward", agreement=agreement)])

    async def ChangeScorer(
        self, request: scorers.ChangeScorerRequest, context: Context
    ) -> scorers.ChangeScorerResponse:
        return scorers.ChangeScorerResponse(scorer=scorers.Scorer(name=request.name))


class _Agent(AgentGateway):
    """Has one task, which the second turn answers."""

    def __init__(self) -> None:
        super().__init__(count=0)
        self._left = [agent.Task(task_id="t", answer="12", messages=[agent.Message(role="user", content="3 * 4 =")])]

    async def NextTask(self, request: agent.NextTaskRequest, context: Context) -> agent.NextTaskResponse:
        if not self._left:
            raise WrongState("the run has ended", reason="RUN_ENDED")
        return agent.NextTaskResponse(task=self._left.pop())

    async def OpenSession(self, request: agent.OpenSessionRequest, context: Context) -> agent.OpenSessionResponse:
        return agent.OpenSessionResponse()

    async def Generate(self, request: agent.GenerateRequest, context: Context) -> Any:
        reply = agent.Message(role="assistant", content="11" if len(request.chat.messages) == 1 else "12")
        chunk = agent.TurnChunk(message=reply, finish_reason=agent.FINISH_REASON_STOP)
        yield agent.GenerateResponse(chunks=[chunk])

    async def CloseSession(self, request: agent.CloseSessionRequest, context: Context) -> agent.CloseSessionResponse:
        assert request.reward == 1
        return agent.CloseSessionResponse()


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
        scorer_service = scorers.DESCRIPTOR.services_by_name["ScorerService"]
        server.add(scorer_service, add_ScorerServiceServicer_to_server, _Scorers())
        for servicer in (_Rollout(tokenizer_sha256(folder)), _Trainer(), Reward(), Reference(), _Agent()):
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


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_snippets_are_typed(tmp_path: Path) -> None:
    for number, snippet in enumerate(_snippets()):
        (tmp_path / f"snippet_{number}.py").write_text(snippet.values[0])
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout


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


def test_the_monitoring_page_lists_the_services_of_its_table() -> None:
    (listed,) = re.findall(r"OpenMetrics: (.*?)\. The endpoint", MONITORING.read_text(), re.DOTALL)
    assert set(re.split(r",\s+|\sand\s", listed)) == set(EXPORTED_BY_SERVICE) - {"every service"}


def test_the_page_of_clients_lists_all_of_them() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `Async\1` \|", (ROOT / "docs/clients/index.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(name for name in fourfold.__all__ if re.fullmatch(r"(?!Async)\w+Client", name))


def _rows(head: str) -> list[list[str]]:
    """Return the cells of the table of the contract's page whose first line begins with `head`."""
    _, found, rest = CONTRACT.read_text().partition(f"\n{head}")
    assert found, f"{CONTRACT.name} has no table {head!r}"
    lines = rest.splitlines()[2:]
    end = next(i for i, line in enumerate(lines) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end]]


def test_the_contract_page_has_every_service_and_its_callers() -> None:
    services = {name: roles for name, roles in POLICY.items() if name.startswith("fourfold.")}
    expected = [
        [f"`{name}`", ", ".join(sorted(services[name])), "yes" if name in PUBLIC_SERVICES else "no"]
        for name in sorted(services)
    ]
    assert _rows("| service |") == expected
    text = CONTRACT.read_text()
    for scope, methods in SCOPES.items():
        (listed,) = re.findall(rf"`{scope}`: ([A-Za-z,\s]+)\.", text)
        assert set(re.split(r",\s+", listed)) == methods


def test_the_contract_page_has_every_method_that_other_programs_call() -> None:
    files = FileDescriptorSet.FromString((PROTO_DIR / DESCRIPTOR_SET).read_bytes()).file
    internal = {"RolloutControlService", "TrainerWeightService", "MembershipService", "ExperienceService"}
    internal |= {"RendezvousService", "RankService"}
    methods = {
        f"`{file.package.removeprefix('fourfold.')}.{service.name}/{method.name}`": (file.package, service, method)
        for file in files
        for service in file.service
        if service.name not in internal
        for method in service.method
    }
    rows = {name: (deadline, again) for name, deadline, again in _rows("| method |")}
    assert rows.keys() == methods.keys()
    for name, (package, service, method) in methods.items():
        deadline, again = rows[name]
        assert (deadline == "none") == (again == "reopen") == is_watch(method.name), name
        if method.name in RETRIED_METHODS.get(f"{package}.{service.name}", ()):
            assert again == "yes", f"{name}: our client repeats it"


def test_the_contract_page_has_every_error() -> None:
    rows = _rows("| code |")
    classes = [row[:2] for row in rows]
    assert sorted(classes) == sorted([code, cls("").reason] for code, cls in BY_CODE.items())
    listed = {reason for row in _rows("| reason |") for reason in row[0].split(", ")}
    paths = [
        ROOT / "fourfold/rpc/interceptors.py",
        ROOT / "fourfold/rpc/limits.py",
        ROOT / "fourfold/security/tokens.py",
    ]
    paths += [ROOT / f"services/rollout/fourfold_rollout/generate/{name}.py" for name in ("admission", "servicer")]
    raised = {reason for path in paths for reason in re.findall(r'"([A-Z]+_[A-Z_]+|DRAINING)"', path.read_text())}
    gateway = [*(ROOT / "services/gateway/fourfold_gateway").rglob("*.py")]
    gateway += [ROOT / "services/coordinator/fourfold_coordinator/tasks/task_queue.py"]
    for path in gateway:
        text = path.read_text()
        names = dict(re.findall(r'^_?([A-Z_]+): Final = "([A-Z_]+)"', text, re.MULTILINE))
        raised |= set(re.findall(r'reason="([A-Z_]+)"', text))
        raised |= {names[name] for name in re.findall(r"reason=_?([A-Z_]+)\b", text) if name in names}
    raised.add(StoreFull("").reason)  # named by its class
    grpc_codes = {code.name for code in grpc.StatusCode}
    assert listed == raised - grpc_codes - {"NOT_SUPPORTED"}  # a parser or a score that the recipe does not have


def test_the_contract_page_has_the_limits_of_the_code() -> None:
    public = dict(PUBLIC_SERVER_OPTIONS)
    gateway = GatewayConfig()
    assert SCORE_BYTES == REFERENCE_BYTES
    expected = [
        f"{public['grpc.max_receive_message_length']} bytes",
        f"{MAX_MESSAGE_BYTES} bytes",
        f"{interceptors._REQUEST_SECONDS:g} s",
        f"{public['grpc.max_concurrent_streams']}",
        f"{public['grpc.max_allowed_incoming_connections']}",
        f"{int(public['grpc.max_connection_idle_ms']) // 1000} s",
        *map(str, (MAX_WATCHES_PER_AGENT, MAX_WATCHES_PER_PRINCIPAL, MAX_WATCHES)),
        f"{MEMBER_LIMITS.concurrent_calls}",
        f"{AGENT_LIMITS.concurrent_calls}",
        f"{AGENT_LIMITS.calls_per_second:g}",
        f"{gateway.max_open_sessions_per_agent}",
        *map(str, (MAX_SAMPLES_PER_CALL, admission._MAX_STOP_TOKENS)),
        f"`{ID_PATTERN.pattern}`",
        f"{SCORE_BYTES} bytes",
        f"{MAX_RETRY_SECONDS:g} s",
        f"2^{MAX_NUMBER.bit_length() - 1}",
    ]
    assert [value for _, value in _rows("| limit |")] == expected


def test_the_path_of_a_sample_names_functions_of_its_files() -> None:
    page = (ROOT / "docs/concepts.md").read_text()
    rows = re.findall(r"^\| (\w+) \| `([\w/]+\.py)` \| `(?:(\w+)\.)?(\w+)` \|", page, re.MULTILINE)
    assert len(rows) > 25
    for service, file, owner, function in rows:
        text = (ROOT / f"services/{service}/fourfold_{service}/{file}").read_text()
        assert re.search(rf"\bdef {function}\(", text), f"{file} has no {function}"
        assert not owner or re.search(rf"^class {owner}\b", text, re.MULTILINE), f"{file} has no {owner}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}
    assert {page for page in pages if page not in navigation} == set()


REGISTRATION = ROOT / "docs/registration.md"


def test_the_page_about_registration_has_the_numbers_and_the_reasons_of_the_registry() -> None:
    page, source = REGISTRATION.read_text(), Path(registry.__file__).read_text()
    for number in (
        f"ttl = {registry.TTL_SECONDS:g} s",
        f"now {registry.TTL_SECONDS:g} s",
        f"has {registry.MAX_MEMBERS} members, or this member {MEMBER_LIMITS.concurrent_calls} calls",
        f"After {registry._OVERDUE_SHARE:.0%} of the `ttl`".replace("%", " %"),
        f"begin with {membership._FIRST_BACKOFF_SECONDS:g} s and double up to {membership._MAX_BACKOFF_SECONDS:g} s",
    ):
        assert number in page, number
    reasons = set(re.findall(r'reason="([A-Z_]+)"', source)) - {"SECOND_TRAINER"}
    assert reasons and {reason for reason in reasons if f" {reason} |" not in page} == set()
    # Errors after which the service ends, in the page and in our own membership.
    rows = [
        row.strip("| ").split(" | ") for row in page.splitlines() if re.match(r"\| (both|Register|KeepAlive) \|", row)
    ]
    assert {row[1] for row in rows if row[-1].startswith("end")} | {"ALREADY_EXISTS"} == {
        error.code for error in membership._PERMANENT
    }


TROUBLESHOOTING = ROOT / "docs/troubleshooting.md"
FOLDERS = ("fourfold", "services")
# Texts of other programs, in tables whose other texts are Fourfold's.
FOREIGN = {"gpu_memory_utilization"}


def _quoted() -> list[str]:
    cells = [line.split("|")[1] for line in TROUBLESHOOTING.read_text().splitlines() if line.startswith("| ")]
    texts = [text for cell in cells for text in re.findall("`([^`]+)`", cell)]
    return [text for text in texts if text not in FOREIGN and not text.endswith(".json") and not text.endswith("/")]


@pytest.fixture(scope="module")
def all_code() -> str:
    """Return all code, with the parts of texts that are split over lines put together."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name]
    text = "\n".join(path.read_text() for path in paths if "build" not in path.relative_to(ROOT).parts)
    return re.sub(r"""(["'])\n\s*f?\1""", "", text)


@pytest.mark.parametrize("message", _quoted())
def test_a_quoted_message_is_in_the_code(message: str, all_code: str) -> None:
    parts = [re.escape(part) for part in message.split("...") if part.strip()]
    value = r"[^\n]{0,400}?"  # in the code, a value is an expression in braces
    assert re.search(value.join(parts), all_code), f"no code writes {message!r}: correct the page"


def test_the_page_quotes_messages() -> None:
    assert len(_quoted()) > 55
