"""The processes that parse texts and compile grammars, with vLLM's parsers and xgrammar."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from fourfold.errors import ConfigError, InvalidInput
from fourfold_rollout.engine import GrammarConstraint
from fourfold_rollout.vllm.text.process import TextProcess

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

TinyModel = Callable[..., Path]
TOOLS = json.dumps(
    [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [1, "\u00fc"]}}\n</tool_call>'
STOPS = [2]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def text(tiny_model: TinyModel) -> AsyncIterator[TextProcess]:
    process = TextProcess(str(tiny_model("qwen2")), "hermes", "qwen3")
    yield process
    await process.close()


class TestParse:
    async def test_reasoning_content_and_tool_calls_are_split(self, text: TextProcess) -> None:
        parsed = await text.parse(f"<think>\nhm\n</think>\n\nI add.\n{CALL}\n{CALL}<|im_end|>", TOOLS)
        assert parsed.reasoning.strip() == "hm"
        assert parsed.content.strip() == "I add."
        assert [(name, json.loads(arguments)) for name, arguments in parsed.tool_calls] == [
            ("add", {"a": [1, "\u00fc"]})
        ] * 2

    async def test_tool_calls_stay_in_the_content_without_tools(self, text: TextProcess) -> None:
        parsed = await text.parse(f"<think>hm</think>{CALL}", "")
        assert (parsed.content, parsed.tool_calls) == (CALL, ())

    @pytest.mark.parametrize("body", ["{", '{"name": 3', "[1]", "null", '"' * 100_000, "[" * 100_000, "\udc80"])
    async def test_broken_calls_are_content(self, text: TextProcess, body: str) -> None:
        broken = f"<tool_call>{body}</tool_call>"
        parsed = await text.parse(f"<think>hm</think>{broken}", TOOLS)
        assert parsed.tool_calls == ()
        assert parsed.content == broken.replace("\udc80", "?")

    @pytest.mark.parametrize("tools", ["{", "3", "[3]", '[{"type": "function"}]', "[" * 100_000])
    async def test_malformed_tools_are_refused(self, text: TextProcess, tools: str) -> None:
        with pytest.raises(InvalidInput, match="tools_json"):
            await text.parse("x", tools)

    async def test_hostile_texts_return_in_time(self, text: TextProcess) -> None:
        texts = [
            part * ((1 << 20) // len(part)) for part in ("<tool_call>", "<think>", "</think>", CALL, "<" * 64, "\n")
        ]
        for hostile in texts:
            async with asyncio.timeout(60):
                await text.parse(hostile, TOOLS)
        assert (await text.parse("</think>b", TOOLS)).content == "b"


class TestGrammars:
    @pytest.mark.parametrize(
        ("kind", "good", "bad"),
        [
            ("json_schema", '{"type": "object"}', '{"type": 3'),
            ("regex", "[ab]+", "[ab"),
            ("ebnf", 'root ::= "a"', "root ::= nope"),
            ("structural_tag_json", '{"type": "structural_tag", "format": {"type": "any_text"}}', "{}"),
        ],
    )
    async def test_errors_have_the_reason(self, text: TextProcess, kind: str, good: str, bad: str) -> None:
        await text.check_grammar(GrammarConstraint(kind=kind, text=good), STOPS, [])  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match=r"does not compile: \w"):
            await text.check_grammar(GrammarConstraint(kind=kind, text=bad), STOPS, [])  # type: ignore[arg-type]

    async def test_the_tokens_so_far_must_fit(self, text: TextProcess, tiny_model: TinyModel) -> None:
        from fourfold.model.tokenizer import Tokenizer

        ids = Tokenizer.load(tiny_model("qwen2")).encode("abc")
        constraint = GrammarConstraint(kind="regex", text="[a-c]+")
        await text.check_grammar(constraint, STOPS, ids)
        with pytest.raises(InvalidInput, match="number 0 of the last 1"):
            await text.check_grammar(GrammarConstraint(kind="regex", text="x"), STOPS, ids[:1])
        with pytest.raises(InvalidInput, match="nothing is left"):
            await text.check_grammar(constraint, STOPS, [*ids, *STOPS])

    async def test_a_grammar_that_reaches_its_limit_is_refused_and_the_process_goes_on(self, text: TextProcess) -> None:
        assert text._process is not None
        process = psutil.Process(text._process.pid)
        properties = {f"k{i}": {"type": "string", "pattern": f"[a-z]{{1,50}}x[0-9]{{1,{i + 9}}}"} for i in range(500)}
        large = GrammarConstraint(kind="json_schema", text=json.dumps({"type": "object", "properties": properties}))
        call = asyncio.create_task(text.check_grammar(large, STOPS, []))
        await asyncio.sleep(0.3)
        assert not call.done()
        busy = max(process.children(), key=lambda fork: fork.cpu_times().user)
        busy.send_signal(signal.SIGPROF)  # the kernel's signal at the limit of CPU time
        with pytest.raises(InvalidInput, match="too much time or memory"):
            await call
        await text.check_grammar(GrammarConstraint(kind="regex", text="a"), STOPS, [])
        assert text._process.pid == process.pid

    async def test_a_caller_that_leaves_disturbs_no_other(self, text: TextProcess) -> None:
        constraint = GrammarConstraint(kind="regex", text="[xy]{1,90}z")
        calls = [asyncio.create_task(text.check_grammar(constraint, STOPS, [])) for _ in range(8)]
        await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        await asyncio.gather(*calls[1::2])

    async def test_a_process_that_is_killed_starts_again(self, text: TextProcess) -> None:
        assert text._process is not None
        forks = psutil.Process(text._process.pid).children()
        text._process.kill()
        text._process.wait(30)
        constraint = GrammarConstraint(kind="regex", text="a")
        for _ in range(3):
            try:
                await text.check_grammar(constraint, STOPS, [])
                break
            except Exception as error:
                assert "has ended" in str(error)
        await text.check_grammar(constraint, STOPS, [])
        assert psutil.wait_procs(forks, timeout=30)[1] == []


@pytest.mark.parametrize(("names", "hint"), [(("hermez", ""), "did you mean `hermes`"), (("", "qwen33"), "`qwen3`")])
async def test_a_misspelt_parser_ends_the_start(tiny_model: TinyModel, names: tuple[str, str], hint: str) -> None:
    process = TextProcess(str(tiny_model("qwen2")), *names)
    with pytest.raises(ConfigError, match=hint):
        await process.ready()
    await process.close()
