"""The parts of `code_tests` that run no code: blocks, tests, values and hostile frames."""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest

from fourfold_reward import Abstain, ScoreInput
from fourfold_reward.code import wire
from fourfold_reward.code.remote import Connection, Remote
from fourfold_reward.code.verifier import _same_text, _tests_of, extract_code
from fourfold_reward.scores import InvalidSample


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", None),
        ("def f(): pass", None),
        ("```python\na = 1\n```", "a = 1"),
        ("```\na = 1\n```", "a = 1"),
        ("```py\na\n```\ntext\n```Python\nb\n\nc\n```\nend", "b\n\nc"),
        ("```python\na\n```\n```bash\nls\n```", "a"),
        ("```python\na\n```\n```python\nb", None),  # cut off
        ("```python\na\n```\n```\n", "a"),
        ("```python\na = '```'\n```", "a = '```'"),
        ("````python\n```\n````", "```"),
        ("1. so\n   ```python\n   if a:\n       b\n\n  c\n   ```", "if a:\n    b\n\nc"),
    ],
)
def test_the_last_block_of_python_counts(text: str, code: str | None) -> None:
    assert extract_code(text) == code


def row(answer: str = "", **metadata: Any) -> ScoreInput:
    return ScoreInput(sample_id="s", prompt="", completion="", answer=answer, metadata=metadata)


def test_tests_come_from_the_column_or_from_the_answer() -> None:
    pair = {"input": "1", "output": "2"}
    for sample in (row(tests=["assert f(1)", pair]), row(json.dumps(["assert f(1)", pair]))):
        tests = _tests_of(sample, "tests")
        assert not isinstance(tests, Abstain)
        assert tests[0].check is not None
        assert (tests[1].check, tests[1].stdin, tests[1].stdout) == (None, "1", "2")
    for sample in (row("x = f(1)\nassert x\nassert x > 1"), row(tests="assert f(1)"), row(json.dumps(pair))):
        tests = _tests_of(sample, "tests")
        assert not isinstance(tests, Abstain) and len(tests) == 1
    for text in (json.dumps([pair, pair]), json.dumps({"inputs": ["1", "1"], "outputs": ["2", "2"], "fn_name": None})):
        for sample in (row(tests=text), row(text)):
            tests = _tests_of(sample, "tests")
            assert not isinstance(tests, Abstain) and [(t.stdin, t.stdout) for t in tests] == [("1", "2")] * 2
    assert _tests_of(row(" "), "tests") == Abstain("NO_ANSWER")
    assert _tests_of(row(tests=["assert f()"]), "other") == Abstain("NO_ANSWER")


@pytest.mark.parametrize(
    "tests",
    [
        [],
        [1],
        ["f(1) == 2"],
        ["assert f("],
        [{"input": "1"}],
        [{"output": 3}],
        [{"input": "1", "output": "2", "type": "function_call", "fn_name": "f"}],
        [{"input": "1", "output": "2", "testtype": "functional"}],
        {"inputs": ["1", "2"], "outputs": ["2"]},
        ["assert 1"] * 513,
        4,
        ["\0"],
        [{"input": "1" * (3 << 20), "output": "1"}],
        ["assert f() == '" + "1" * (3 << 20) + "'"],
    ],
)
def test_malformed_tests_are_an_error_of_the_row(tests: Any) -> None:
    with pytest.raises(InvalidSample) as info:
        _tests_of(row(tests=tests), "tests")
    assert info.value.reason == "BAD_METADATA"


def test_texts_are_compared_by_lines() -> None:
    assert _same_text("1 \n2\n\n", "1\n2")
    assert _same_text("1\r\n2", "1\n2\n")
    assert not _same_text("1 2", "1\n2")
    assert not _same_text("\n1", "1")
    assert not _same_text("", "1")


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        10**6000,
        -(10**20),
        0.1,
        math.inf,
        "text \ud800 \U0001f600",
        b"\x00\xff",
        3 + 4j,
        [1, [2, (3, {4})]],
        {"a": 1, (1, 2): frozenset({3})},
        {"o": 3},
        (),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_arrive_as_they_were(value: Any) -> None:
    def no_handle(found: object) -> Any:
        raise AssertionError(found)

    encoded = json.loads(json.dumps(wire.encode(value, no_handle)))
    decoded = wire.decode(encoded, no_handle)
    assert decoded == value and type(decoded) is type(value)
    assert math.isnan(wire.decode(wire.encode(math.nan, no_handle), no_handle))


@pytest.mark.parametrize(
    "data",
    [
        *({}, {"i": 5}, {"i": "zz"}, {"f": []}, {"d": [[1]]}, {"d": 7}, {"s": [[1]]}, {"x": 1}, {"o": "1"}),
        *({"c": ["a"]}, {"t": 4}, {"a": 1, "b": 2}, {"b": "0"}, {"d": [[[1], 2]]}),
    ],
)
def test_malformed_values_are_refused(data: Any) -> None:
    with pytest.raises(wire.WireError, match="malformed value"):
        wire.decode(data, lambda number: number)


@dataclass
class Runner:
    """The socket of a runner, and the connection of the scoring process."""

    theirs: socket.socket
    connection: Connection


MakeRunner = Callable[..., Runner]


@pytest.fixture
def make_runner() -> Iterator[MakeRunner]:
    """Return a function that makes runners, which have sent prepared frames."""
    sockets: list[socket.socket] = []

    def make(*frames: bytes | dict[str, Any]) -> Runner:
        ours, theirs = socket.socketpair()
        sockets.extend((ours, theirs))
        for frame in frames:
            body = frame if isinstance(frame, bytes) else json.dumps(frame).encode()
            theirs.sendall(struct.pack("<I", len(body)) + body)
        return Runner(theirs, Connection(ours, time.monotonic() + 0.2))

    yield make
    for each in sockets:
        each.close()


def test_names_of_python_and_of_tests_cannot_be_replaced(make_runner: MakeRunner) -> None:
    names = {"sorted": 1, "len": 1, "__name__": 1, "class": 1, "a b": 1, "f": {"o": 0}, "N": [1]}
    found = make_runner({"names": names}).connection.names()
    assert set(found) == {"f", "N"}
    assert isinstance(found["f"], Remote) and found["N"] == [1]


@pytest.mark.parametrize("answer", [b"[]", b"x", b"[" * 100_000, {}, {"names": 3}, {"names": {"f": {"z": 1}}}])
def test_a_hostile_answer_is_a_failure(make_runner: MakeRunner, answer: Any) -> None:
    with pytest.raises(wire.WireError):
        make_runner(answer).connection.names()


def test_a_runner_that_is_silent_or_announces_too_much_is_a_failure(make_runner: MakeRunner) -> None:
    with pytest.raises(wire.WireError, match="no answer"):
        make_runner().connection.names()
    runner = make_runner()
    runner.theirs.sendall(struct.pack("<I", 1 << 31))
    with pytest.raises(wire.WireError, match="at most"):
        runner.connection.names()
    runner = make_runner()
    runner.theirs.close()
    with pytest.raises(wire.WireError, match="ended"):
        runner.connection.names()


@pytest.mark.parametrize("sent", [b"", b"rea", b"stopped"])
def test_a_runner_that_is_not_ready_did_not_start(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        theirs.sendall(sent)
        with pytest.raises(wire.WireError):
            wire.wait_until_ready(ours, deadline=time.monotonic() + 0.1)


def test_an_object_of_the_code_is_never_equal_and_its_texts_are_texts(make_runner: MakeRunner) -> None:
    answers = [{"value": value} for value in ({"o": 1}, "text", 3, True, [1, 2], 2, {"o": 2}, 5)]
    remote = make_runner({"names": {"f": {"o": 0}}}, *answers).connection.names()["f"]
    thing = remote(4)
    for compare in (lambda: thing == 4, lambda: thing != 4, lambda: thing in [4]):
        with pytest.raises(wire.WireError, match="cannot compare"):
            compare()
    assert str(thing) == "text" and len(thing) == 3 and bool(thing) and list(thing) == [1, 2]
    with pytest.raises(wire.WireError, match="sent a Remote for str"):
        str(thing)
    with pytest.raises(wire.WireError, match="sent a int for repr"):
        repr(thing)
    with pytest.raises(TypeError):
        thing < 4  # noqa: B015
    with pytest.raises(wire.WireError, match="cannot be passed"):
        thing(object())


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (["ValueError", "no"], ValueError),
        (["AssertionError", ""], RuntimeError),
        (["SystemExit", "0"], RuntimeError),
        (["KeyboardInterrupt", ""], RuntimeError),
        (["UnicodeDecodeError", ""], RuntimeError),
        (["print", ""], RuntimeError),
        (["no such name", ""], RuntimeError),
        ([1], wire.WireError),
        ("text", wire.WireError),
    ],
)
def test_exceptions_become_built_in_ones(make_runner: MakeRunner, raised: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        make_runner({"raised": raised}).connection.names()
