"""What a prompt may cost: sizes that cannot fit the context, the quota of its caller, and prompts at a time."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.errors import InvalidInput, Overloaded
from fourfold.model.tokenizer import Tokenizer
from fourfold.rpc.limits import Quotas
from fourfold.security.principal import LOCAL_AGENT, UNLIMITED, CallerLimits, Principal
from fourfold_gateway import encoding
from fourfold_gateway.conversation import ChatTemplate
from fourfold_gateway.encoding import PromptEncoder, PromptLimits
from tests.support.chat_templates import family_tokenizer

CONTEXT = 8192
TEXT = 16 * CONTEXT
AGENT = Principal("agent", "a")


def chat(*contents: str, reasoning: str = "") -> pb.Chat:
    return pb.Chat(messages=[pb.Message(role="user", content=text, reasoning=reasoning) for text in contents])


def never(*_: object) -> NoReturn:
    raise AssertionError("it was rendered")


def unlimited() -> PromptEncoder:
    return PromptEncoder(PromptLimits(CONTEXT), Quotas(lambda _: UNLIMITED))


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (chat("x" * (7 << 20)), "the messages and tools have 7340"),
        (chat("", reasoning="x" * (5 * TEXT)), "bytes, and at most 524288"),
        (pb.Chat(messages=[pb.Message()], tools=[pb.Tool(parameters_json="x" * (5 * TEXT))]), "at most 524288"),
        (chat(*"x" * 2049), "2049 messages, tools and tool calls, and at most 2048"),
        (pb.Chat(messages=[pb.Message(tool_calls=[pb.ToolCall()] * 2048)]), "the prompt has 2049"),
        (pb.Chat(messages=[pb.Message()], tools=[pb.Tool()] * 2048), "the prompt has 2049"),
        ("x" * (TEXT + 1), "at most 131072 are encoded for a context of 8192"),
        ("\u00e9" * (TEXT // 2 + 1), "has 131074 bytes"),
    ],
)
async def test_a_prompt_that_cannot_fit_the_context_is_refused_before_it_is_rendered(
    prompt: pb.Chat | str, text: str
) -> None:
    with pytest.raises(InvalidInput, match=text) as caught:
        await unlimited().run(LOCAL_AGENT, prompt, never)
    assert caught.value.reason == "CONTEXT_LENGTH"


def test_the_text_that_a_template_writes_is_limited_and_what_it_leaves_out_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate(family_tokenizer(tmp_path, "qwen3"), PromptLimits(CONTEXT))
    dropped = pb.Message(role="assistant", content="4", reasoning="x" * (2 * TEXT))
    asked, again = (pb.Message(role="user", content=text) for text in ("2+2?", "Sure?"))
    assert template.encode(pb.Chat(messages=[asked, dropped, again]))[1]
    monkeypatch.setattr(Tokenizer, "encode", never)
    with pytest.raises(InvalidInput, match="the text of the prompt has 2"):
        template.encode(pb.Chat(messages=[asked, dropped]))


@pytest.mark.parametrize("context", [64, 1 << 17])
def test_ordinary_text_as_long_as_the_context_is_taken(context: int) -> None:
    limits, line = PromptLimits(context), "        return  x\n"  # of four tokens
    assert limits.check(line * (context // 4)) and limits.check(chat(*[line * 8] * (context // 32)))


async def test_the_quota_is_charged_before_the_work() -> None:
    quotas = Quotas(lambda _: CallerLimits(tokens_in_flight=300, concurrent_calls=8, calls_per_second=math.inf))
    encoder = PromptEncoder(PromptLimits(CONTEXT), quotas)
    with quotas.tokens(AGENT, 1), pytest.raises(Overloaded, match="tokens_in_flight"):
        await encoder.run(AGENT, "x" * 1200, never)
    for size in (1200, 1600):  # perhaps of 300 tokens: the exact number decides
        assert await encoder.run(AGENT, "x" * size, lambda _: quotas.usage(AGENT)[1]) == 300
    assert quotas.usage(AGENT)[1] == 0


async def test_few_prompts_are_encoded_at_a_time_and_large_ones_hold_no_others_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder, go_on, running = unlimited(), threading.Event(), list[int]()
    monkeypatch.setattr(encoding, "_MAX_WAITING_BYTES", 13 << 17)

    def work(size: int) -> int:
        running.append(size)
        go_on.wait(10)
        return size

    def start(size: int) -> asyncio.Task[int]:
        return asyncio.create_task(encoder.run(LOCAL_AGENT, chat("x" * size), lambda _: work(size)))

    large = [start(3 << 17) for _ in range(3)]
    others = [start(1 << 16) for _ in range(4)]
    await asyncio.sleep(0.2)
    assert sorted(running) == [1 << 16, 1 << 16, 3 << 17]
    assert await encoder.run(LOCAL_AGENT, "small", lambda _: 1) == 1, "on the event loop"
    with pytest.raises(Overloaded, match="too many prompts wait"):
        await start(3 << 17)
    large[0].cancel()  # its thread goes on, and keeps its slot
    large[1].cancel()
    await asyncio.sleep(0.1)
    assert (len(running), large[0].done(), large[1].done()) == (3, False, True)
    go_on.set()
    assert await asyncio.gather(large[2], *others) == [3 << 17, *[1 << 16] * 4]
    assert running.count(3 << 17) == 2 and encoder._waiting_bytes == 0


def test_other_threads_run_while_a_text_is_encoded() -> None:
    tokenizer = Tokenizer.load("builtin:smollm2-135m-instruct")
    ticks, done = list[float](), threading.Event()

    def tick() -> None:
        while not done.wait(0.002):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    text = "".join(f"{number} w{number % 977} " for number in range(60_000))
    begin = time.monotonic()
    ids = tokenizer.encode(text)
    end = time.monotonic()
    done.set()
    thread.join()
    assert tokenizer.decode(ids) == text
    assert sum(begin < at < begin + 0.8 * (end - begin) for at in ticks) > 4
