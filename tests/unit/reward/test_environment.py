"""The values of environments on their way through the pipe, tools of functions, and the adapters of libraries."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import pytest

from fourfold.model.tokenizer import Tokenizer
from fourfold_reward.code.remote import Remote
from fourfold_reward.environment import Action, Done, Endpoint, Message, Observation, Task, TokenIds, tools, wire
from fourfold_reward.environment.adapters import Factory, load
from fourfold_reward.environment.adapters.gymnasium import GymnasiumEpisode
from fourfold_reward.environment.adapters.openenv import OpenEnvEpisode
from fourfold_reward.environment.adapters.openrlhf import _Tokenizer
from fourfold_reward.environment.python_tool import MAX_OUTPUT_BYTES, PythonTool
from fourfold_reward.environment.spec import EnvironmentSpec
from fourfold_reward.environment.worker import Worker
from fourfold_reward.loader import VerifierError

TASK = Task(
    task_id="t", group_id="g", messages=(Message("system", "s"), Message("user", "u")), answer="a", seed=1 << 40
)


def action(text: str) -> Action:
    return Action(text=text, message=Message("assistant", text))


def test_the_interface_needs_no_grpc() -> None:
    code = "import sys, fourfold_reward.environment; sys.exit(bool({'grpc', 'numpy', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"messages": []},
        {"messages": "text"},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "colour": "red"}]},
        {"messages": [{"role": "user", "content": "x"}] * (wire.MAX_MESSAGES + 1)},
        {"messages": [{"role": "user", "content": "x" * (wire.MAX_CHARACTERS + 1)}]},
        {"raw": 5},
        {"raw": "x" * (wire.MAX_CHARACTERS + 1)},
        {"ids": []},
        {"ids": [-1]},
        {"ids": [True]},
        {"ids": [1 << 31]},
    ],
)
def test_a_malformed_observation_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        wire.observation_from(data)


@pytest.mark.parametrize(
    "data",
    [
        {"reward": "1"},
        {"reward": float("inf")},
        {"reward": [1.0]},
        {"reward": 1.0, "turn_rewards": [1.0]},
        {"reward": 1.0, "turn_rewards": {"-1": 1.0}},
        {"reward": 1.0, "metrics": {"\x1b[31m": 1.0}},
        {"reward": 1.0, "metrics": {str(i): 1.0 for i in range(wire.MAX_METRICS + 1)}},
    ],
)
def test_a_malformed_end_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        wire.done_from(data)


def test_values_survive_the_pipe() -> None:
    done = Done(1.5, {0: -1.0}, {"a/b": 2.0}, truncated=True)
    assert wire.done_from(json.loads(json.dumps(wire.done_to(done)))) == done
    assert wire.task_from(json.loads(json.dumps(wire.task_to(TASK)))) == TASK
    assert wire.action_from(json.loads(json.dumps(wire.action_to(action("x"))))) == action("x")
    ids = Observation(TokenIds((1, 2)))
    assert wire.observation_from(json.loads(json.dumps(wire.observation_to(ids)))) == ids
    assert wire.observation_from(wire.observation_to(Observation("x"))) == Observation((Message("user", "x"),))


def search(query: str, kind: Literal["web", "news"] = "web", limit: int = 3) -> str:
    """Searches the web,
    and the news.

    Args:
        query: what to look for
        limit (int): number of results
    """
    return query * limit


def test_a_function_becomes_a_tool_with_a_schema() -> None:
    described = tools.Tool.of(search).describe()
    assert (described["name"], described["description"]) == ("search", "Searches the web, and the news.")
    schema = json.loads(described["parameters_json"])
    assert schema["required"] == ["query"] and schema["additionalProperties"] is False
    assert schema["properties"]["query"] == {"type": "string", "description": "what to look for"}
    assert schema["properties"]["kind"]["enum"] == ["web", "news"]
    assert schema["properties"]["limit"]["description"] == "number of results"


def test_arguments_of_a_call_are_checked() -> None:
    tool = tools.Tool.of(search)
    assert tool.parse('{"query": "x", "limit": 2}') == {"query": "x", "kind": "web", "limit": 2}
    for text in (
        "",
        "[]",
        "{",
        '{"query": 5}',
        '{"query": "x", "kind": "y"}',
        '{"query": "x", "other": 1}',
        "[" * 100_000,
    ):
        with pytest.raises(ValueError, match="search: "):
            tool.parse(text)


def test_functions_that_cannot_be_described_are_refused() -> None:
    def untyped(x):  # type: ignore[no-untyped-def]
        return x

    def many(*values: int) -> int:
        return sum(values)

    for function in (untyped, many):
        with pytest.raises(VerifierError):
            tools.Tool.of(function)


def test_results_of_tools_are_text_within_limits() -> None:
    assert tools.result_text({"a": [1, None]}) == '{"a": [1, null]}'
    assert tools.result_text(object).startswith("<class")
    text = tools.result_text("\x1b[2J" + "x" * 10_000_000)
    assert len(text) < tools.MAX_RESULT_CHARACTERS + 100 and "\x1b" not in text and "10000004 characters" in text


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("x = 6\nprint(1)\nx * 7", "1\n42"),
        ("", "(no output)"),
        ("1 / 0", "ZeroDivisionError"),
        ("import socket; socket.socket()", "PermissionError"),
        ("import os; os.fork()", "PermissionError"),
        ("open('/etc/hostname').read()", "PermissionError"),
        ("x = 'x' * (1 << 34)", "MemoryError"),
        ("import os; os.kill(os.getpid(), 9)", "Error"),
        ("print('\\x1b[31m')", "?[31m"),
    ],
)
async def test_the_interpreter_returns_output_and_refuses_rights(code: str, result: str) -> None:
    text, valid = await PythonTool(seconds=30).call(json.dumps({"code": code}))
    assert valid and result in text and "\x1b" not in text


async def test_the_interpreter_reads_neither_the_checkout_nor_pythonpath(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret_module.py").write_text("KEY = 918273645")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    tool, root = PythonTool(seconds=30), Path(__file__).parents[3]
    for path in (tmp_path / "secret_module.py", root / "README.md", root / "fourfold" / "answers.py"):
        text, _ = await tool.call(json.dumps({"code": f"print(open({str(path)!r}).read())"}))
        assert "PermissionError" in text, path
    text, _ = await tool.call(json.dumps({"code": "import secret_module; print(secret_module.KEY)"}))
    assert "ModuleNotFoundError" in text
    text, _ = await tool.call(json.dumps({"code": "import os, sys, numpy; 'PYTHONPATH' in os.environ"}))
    assert text == "False"


def test_an_exception_with_a_broken_text_has_its_type_and_its_place() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    worker = Worker()
    text = worker._explain(BrokenError())
    assert text == "BrokenError, whose __str__ raised KeyboardInterrupt"
    answer = asyncio.run(worker.answer({"op": "load", "spec": BrokenError()}))
    assert answer["error"].startswith("TypeError: ")


async def test_the_interpreter_is_stopped_at_its_limits() -> None:
    text, _ = await PythonTool(seconds=30).call(json.dumps({"code": "while True: print('x' * 999)"}))
    assert "[cut at" in text and len(text) < MAX_OUTPUT_BYTES + 100
    text, _ = await PythonTool(seconds=1).call(json.dumps({"code": "import time; time.sleep(1000)"}))
    assert "stopped after 1 s" in text
    for arguments in ("", "[]", "{", '{"code": 5}', '{"code": "1", "other": 2}'):
        assert (await PythonTool(seconds=1).call(arguments))[1] is False


class Counting:
    """A text environment of Gymnasium."""

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        assert 0 <= seed < 1 << 31
        self.target, self.count = options["answer"], 0
        return f"say {self.target}", {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return "again", 0.5, text == self.target, self.count == 3, {}


def test_a_gymnasium_environment_adds_up_its_rewards() -> None:
    episode = GymnasiumEpisode(Counting())
    assert episode.reset(TASK) == Observation("say a")
    assert episode.step(action("b")) == Observation("again")
    assert episode.step(action("a")) == Done(1.0)
    episode.reset(TASK)
    episode = GymnasiumEpisode(Counting())
    episode.reset(TASK)
    assert [episode.step(action("b")) for _ in range(3)][-1] == Done(1.5, truncated=True)
    episode.close()


class Socket:
    """A connection to a server of OpenEnv that gives prepared answers."""

    def __init__(self, *answers: object) -> None:
        self.answers, self.sent = list(answers), list[Any]()
        self.closed = 0

    async def ws_connect(self, url: str, **_: Any) -> Socket:
        assert url == "ws://x/ws"
        return self

    async def send_str(self, text: str) -> None:
        self.sent.append(json.loads(text))

    async def receive(self) -> Any:
        answer = self.answers.pop(0)
        return types.SimpleNamespace(data=answer if isinstance(answer, str | None) else json.dumps(answer))

    async def close(self) -> None:
        self.closed += 1


def seen(text: str, *, reward: float | None = None, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"text": text}, "reward": reward, "done": done}}


async def test_an_openenv_episode_is_one_connection() -> None:
    socket = Socket(seen("hello"), seen("more", reward=0.5), seen("end", reward=1.0, done=True))
    episode = OpenEnvEpisode(lambda: socket, "ws://x/ws", observation_field="text", reset={"level": 3})
    assert await episode.reset(TASK) == Observation("hello")
    assert await episode.step(action("go")) == Observation("more")
    assert episode.truncate() == Done(0.5, truncated=True)
    assert await episode.step(action("on")) == Done(1.5)
    await episode.close()
    assert [m["type"] for m in socket.sent] == ["reset", "step", "step"] and socket.closed == 2
    assert socket.sent[0]["data"]["level"] == 3 and socket.sent[1]["data"] == {"message": "go"}


@pytest.mark.parametrize("answer", ["", "rubbish", None, "[]", {"type": "observation"}, {"type": "error", "data": {}}])
async def test_a_faulty_openenv_server_is_named(answer: object) -> None:
    episode = OpenEnvEpisode(lambda: Socket(answer), "ws://x/ws")
    with pytest.raises(RuntimeError, match="ws://x/ws answered reset"):
        await episode.reset(TASK)


async def test_a_proxy_that_fails_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(Socket):
        async def ws_connect(self, url: str, **options: Any) -> Socket:
            raise OSError(f"407, url={options['proxy']!r}")

    monkeypatch.setenv("https_proxy", "http://me:secret@proxy:3128")
    with pytest.raises(RuntimeError, match=r"wss://e\.example/ws cannot be reached through the proxy") as caught:
        await OpenEnvEpisode(Refusing, "wss://e.example/ws").reset(TASK)
    assert "secret" not in str(caught.value) and caught.value.__suppress_context__


@pytest.fixture
def verifiers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A stand-in for the library verifiers: an environment, and the arguments of its rollout."""
    seen: dict[str, Any] = {}

    class Client:
        def __init__(self, connection: Any) -> None:
            self.connection = connection

    class Environment:
        async def run_rollout(self, row: Any, client: Client, model: str, sampling: Any) -> dict[str, Any]:
            seen.update(row=row, model=model, url=str(client.connection.base_url), key=client.connection.api_key)
            seen.setdefault("pools", set()).add(client.connection._client)
            error = "no" if row["answer"] == "fail" else None
            return {"reward": 0.5, "metrics": {"a": 1, "b": "x"}, "is_truncated": True, "error": error}

    def load_environment(name: str, **options: Any) -> Environment:
        # As the library does, which Python allows in the main thread alone.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        seen.update(name=name, **options)
        return Environment()

    library, clients = types.ModuleType("verifiers"), types.ModuleType("verifiers.clients")
    library.__dict__.update(load_environment=load_environment)
    library.__dict__.update(clients=clients)
    clients.__dict__.update(OpenAIChatCompletionsClient=Client)
    monkeypatch.setitem(sys.modules, "verifiers", library)
    monkeypatch.setitem(sys.modules, "verifiers.clients", clients)
    yield seen


async def test_a_verifiers_environment_calls_the_session(verifiers: dict[str, Any]) -> None:
    pytest.importorskip("openai")
    # Workers load in a thread.
    factory = await asyncio.to_thread(load, EnvironmentSpec(kind="verifiers", source="wordle", options={"size": 3}))
    assert factory.is_agent and signal.signal.__module__ == "signal"
    endpoint = Endpoint(base_url="http://127.0.0.1:1/sessions/s/v1", api_key="key", model="toy")
    done = await factory.make().run(TASK, endpoint)
    assert done == Done(0.5, metrics={"a": 1}, truncated=True)
    assert (verifiers["name"], verifiers["size"], verifiers["key"]) == ("wordle", 3, "key")
    assert verifiers["url"].startswith(endpoint.base_url) and verifiers["model"] == "toy"
    assert verifiers["row"]["prompt"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    with pytest.raises(RuntimeError, match="verifiers reports"):
        await factory.make().run(Task(task_id="t", group_id="g", text="x", answer="fail"), endpoint)
    assert len(verifiers["pools"]) == 1  # a pool of connections for each session would take 40 ms of CPU


def test_a_version_of_verifiers_without_the_classic_api_is_refused(verifiers: dict[str, Any]) -> None:
    pytest.importorskip("openai")
    del sys.modules["verifiers.clients"]
    with pytest.raises(ImportError, match=r"verifiers below 0.4, .*reward\[verifiers\]"):
        load(EnvironmentSpec(kind="verifiers", source="wordle"))


OPENRLHF_AGENT = """
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor

class Own(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, **kwargs):
        text = hf_tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        ids = hf_tokenizer.encode(text, add_special_tokens=False)
        room = min(sampling_params.max_tokens, max_length - len(ids))
        await llm_engine.generate(ids, sampling_params)
        tokens = hf_tokenizer(text, add_special_tokens=False, return_tensors="np")
        logs = {"room": room, "temperature": sampling_params.temperature, "eos": hf_tokenizer.eos_token_id}
        logs |= {"pad": hf_tokenizer.pad_token_id, "size": len(hf_tokenizer)}
        logs |= {"same": tokens["input_ids"].tolist() == [ids]}
        logs |= {"named": bool(hf_tokenizer.name_or_path), "back": hf_tokenizer.decode(ids) == text}
        return {"reward": 1.0, "scores": 1.0, "extra_logs": logs}

class Steps(AgentInstanceBase):
    async def step(self, states, **kwargs):
        asked = states["sampling_params"]
        return {"rewards": asked.max_tokens, "scores": asked.temperature, "environment_feedback": "", "done": True}
"""


async def test_an_openrlhf_file_gets_the_recipes_sampling_and_the_tokenizer_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = pytest.importorskip("transformers").PreTrainedTokenizerFast
    reads = Mock(side_effect=kind.from_pretrained)
    monkeypatch.setattr(kind, "from_pretrained", reads)
    source = "builtin:smollm2-135m-instruct"
    reference = Tokenizer.load(source)
    (eos,) = reference.stop_token_ids

    def factory(name: str) -> Factory:
        file = {"file": "agent.py", "text": OPENRLHF_AGENT, "name": name, "version": "1"}
        spec = EnvironmentSpec(
            kind="openrlhf", file=file, model=source, max_context_tokens=64, max_new_tokens=24, temperature=0.5
        )
        return load(spec)

    task, own = Task(task_id="t", group_id="g", text="1+1=", answer="2"), factory("Own")
    episode: Any = own.make()
    first = await episode.reset(task)
    chat = [{"role": "user", "content": "1+1="}]
    ids = reference.encode(reference.render_chat(chat))
    assert first.content == TokenIds(tuple(ids))
    done = await episode.step(action("2"))
    assert done.metrics == {
        "scores": 1.0, "room": min(24, 64 - len(ids)), "temperature": 0.5, "eos": eos, "pad": eos,
        "size": reference.vocabulary_size, "same": True, "named": True, "back": True,
    }  # fmt: skip
    await own.make().reset(task)
    assert reads.call_count == 1, "each episode read the tokenizer"
    steps: Any = factory("Steps").make()
    await steps.reset(task)
    done = await steps.step(action("2"))
    assert (done.reward, done.metrics["scores"]) == (24, 0.5)


@pytest.mark.parametrize("kind", [_Tokenizer, Remote])
def test_a_stand_in_without_its_init_has_no_attributes(kind: type[Any]) -> None:
    """As when it is copied: the look-up of the first attribute called itself without end."""
    blank = object.__new__(kind)
    assert not hasattr(blank, "decode") and not hasattr(blank, "_source") and not hasattr(blank, "_connection")


def test_a_missing_library_is_named_with_its_extra() -> None:
    for kind, source in (("verifiers", "x"), ("gymnasium", "Env-v0")):
        try:
            __import__(kind)
        except ImportError:
            with pytest.raises(ImportError, match=rf"reward\[{kind}\]"):
                load(EnvironmentSpec(kind=kind, source=source))
