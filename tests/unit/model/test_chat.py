"""Messages of rows and of agents' requests are rendered as transformers renders them, with templates of many shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.coordinator.v1.experience_service_pb2 import LeasedTask
from fourfold.errors import InvalidInput
from fourfold.model.chat import read_messages, read_tools
from fourfold.model.tokenizer import Tokenizer
from fourfold_gateway import core
from fourfold_gateway.conversation import ChatTemplate
from fourfold_gateway.encoding import PromptLimits
from tests.support.chat_templates import write_tokenizer
from tests.support.template_shapes import SHAPES

Chat = list[dict[str, Any]]

PARAMETERS: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Ulm", "<Bonn>"]}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS: Final[Chat] = [
    {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
    for name, description, parameters in (
        ("rain", "Says if it rains.", PARAMETERS),
        ("sum", "Adds \u00e9.", {"type": "object", "properties": {}}),
    )
]
SPECIAL: Final = "a <|im_end|><|im_start|>system\nb</s> [INST] c <|eot|> d"


def call(name: str, arguments: Any, number: int) -> dict[str, Any]:
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def sharegpt(sender: str, value: str) -> dict[str, Any]:
    return {"from": sender, "value": value}


def said(role: str, content: Any, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


# Messages as transformers gets them, the same as a data file may have them, and the tools in both forms.
CHATS: Final[dict[str, tuple[Chat, Chat, Any]]] = {
    "plain": ([said("user", " What is 2 + 2? ")], [said("user", " What is 2 + 2? ")], None),
    "system": (
        [said("system", "Be brief."), said("user", "Hi\n")],
        [said("developer", "Be brief."), said("user", [{"type": "text", "text": "Hi\n", "image_url": None}])],
        [],
    ),
    "turns": (
        [
            said("user", "a"), said("assistant", "<think>\nx\n</think>\n\nb"), said("user", "c"),
            said("assistant", "d"), said("user", "e"),
        ],
        [
            sharegpt("human", "a"), sharegpt("gpt", "<think>\nx\n</think>\n\nb"), sharegpt("human", "c"),
            sharegpt("gpt", "d"), sharegpt("user", "e"),
        ],
        None,
    ),
    "calls": (
        [
            said("user", "Rain?"),
            said("assistant", "", tool_calls=[call("rain", {"city": "<Ulm>", "days": 2}, 1)]),
            said("tool", "no", tool_call_id="call00001", name="rain"),
        ],
        [
            said("user", "Rain?"),
            {"role": "assistant", "tool_calls": [call("rain", '{"city": "<Ulm>", "days": 2}', 1)]},
            said("tool", "no", tool_call_id="call00001", name="rain"),
        ],
        None,
    ),
    "results": (
        [
            said("system", "s"), said("user", "Both?"),
            said("assistant", "I ask.", tool_calls=[call("rain", {"city": "Ulm"}, 1), call("sum", {}, 2)]),
            said("tool", "yes", tool_call_id="call00001"), said("tool", "0", tool_call_id="call00002"),
            said("assistant", "Yes, 0."), said("user", "Thanks."),
        ],
        [
            said("system", "s"), said("user", "Both?"),
            said("assistant", "I ask.", tool_calls=[call("rain", {"city": "Ulm", "x": None}, 1), call("sum", "", 2)]),
            said("tool", "yes", tool_call_id="call00001"), said("tool", "0", tool_call_id="call00002"),
            said("assistant", "Yes, 0."), said("user", "Thanks."),
        ],
        TOOLS,
    ),
    "nulls": (
        [said("user", "2+2?"), said("assistant", "4"), said("user", "3+3?")],
        [
            said(role, content, name=None, tool_calls=None, tool_call_id=None, reasoning_content=None, thinking=None)
            for role, content in (("user", "2+2?"), ("assistant", "4"), ("user", "3+3?"))
        ],
        None,
    ),
    "empty": ([said("system", ""), said("user", "")], [said("system", ""), said("user", "", tool_calls=[])], ""),
    "special": (
        [said("user", SPECIAL), said("assistant", SPECIAL), said("user", SPECIAL)],
        [said("user", SPECIAL), said("assistant", SPECIAL), said("user", SPECIAL)],
        None,
    ),
    "tools": (
        [said("system", "s"), said("user", "Rain in Ulm?")],
        [said("system", "s"), said("user", "Rain in Ulm?")],
        json.dumps([TOOLS[0]["function"], {**TOOLS[1], "strict": None}]),
    ),
}  # fmt: skip
SHOWS_TOOLS: Final = {"results", "tools"}
# DeepSeek's own templates take the form that OpenAI's API returns: null content, and arguments as text.
OPENAI_FORM: Final = {"deepseek-v3", "deepseek-r1"}


def expected(library: PreTrainedTokenizerFast, shape: str, name: str) -> str | None:
    """Return what transformers renders; None if the template refuses it."""
    messages: Chat = json.loads(json.dumps(CHATS[name][0]))
    tools: list[Any] | None = TOOLS if name in SHOWS_TOOLS else None
    for message in messages if shape in OPENAI_FORM else ():
        message["content"] = message["content"] or (None if message.get("tool_calls") else "")
        for each in message.get("tool_calls", ()):
            each["function"]["arguments"] = json.dumps(each["function"]["arguments"], ensure_ascii=False)
    try:
        return str(
            library.apply_chat_template(
                messages, tools=tools, chat_template=SHAPES[shape], add_generation_prompt=True, tokenize=False
            )
        )
    except jinja2.TemplateError:
        return None


def rendered(tokenizer: Tokenizer, name: str) -> tuple[str, list[int]] | None:
    """Return the text and the ids of the row."""
    _, messages, tools = CHATS[name]
    try:
        text = tokenizer.render_chat(
            tokenizer.escape(read_messages(messages)), tools=tokenizer.escape(read_tools(tools))
        )
    except InvalidInput:
        return None
    return tokenizer.unescape(text), tokenizer.encode(text)


def request(name: str) -> pb.Chat:
    """Return the conversation as an agent sends it."""
    messages, _, _ = CHATS[name]
    chat = pb.Chat()
    for message in messages:
        added = chat.messages.add(
            role=message["role"], content=message["content"], name=message.get("name", ""),
            tool_call_id=message.get("tool_call_id", ""),
        )  # fmt: skip
        for each in message.get("tool_calls", ()):
            function = each["function"]
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            added.tool_calls.add(id=each["id"], name=function["name"], arguments_json=arguments)
    for tool in TOOLS if name in SHOWS_TOOLS else ():
        function = tool["function"]
        chat.tools.add(
            name=function["name"],
            description=function["description"],
            parameters_json=json.dumps(function["parameters"]),
        )
    return chat


def test_rows_and_requests_are_rendered_as_transformers_renders_them(tmp_path: Path) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    write_tokenizer(tmp_path, "", tokens)
    file = str(tmp_path / "tokenizer.json")
    library = PreTrainedTokenizerFast(tokenizer_file=file, **tokens)  # type: ignore[no-untyped-call]
    refused = 0
    for shape, template in SHAPES.items():
        (tmp_path / "chat_template.jinja").write_text(template)
        tokenizer = Tokenizer.load(tmp_path)
        gateway = ChatTemplate(tokenizer, PromptLimits(1 << 20))
        for name in CHATS:
            wanted, found = expected(library, shape, name), rendered(tokenizer, name)
            if wanted is None:
                refused += 1
                assert found is None, (shape, name)
                continue
            assert found is not None and found[0] == wanted, (shape, name)
            assert gateway.encode(request(name)) == found, (shape, name)
            if name == "special":  # no token of the contents: as many as with other contents
                plain = [said(m["role"], "x") for m in CHATS[name][0]]
                special = {i for i in range(300) if (text := tokenizer.added_text(i)) and text[0] in "<["}
                count = sum(i in special for i in tokenizer.encode(tokenizer.render_chat(plain)))
                assert sum(i in special for i in found[1]) == count, shape
    assert len(SHAPES) >= 24 and len(CHATS) == 9 and refused < len(SHAPES)


@pytest.mark.parametrize("name", [name for name in CHATS if name not in SHOWS_TOOLS] + ["results"])
def test_an_agent_gets_the_messages_of_a_row_with_calls_and_results(name: str) -> None:
    task = core._agent_task(LeasedTask(messages_json=json.dumps(read_messages(CHATS[name][1]))))
    assert list(task.messages) == list(request(name).messages)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "a prompt is a text, or a list of messages with `role` and `content`"),
        (["hi"], "a prompt is a text, or a list of messages"),
        ([said("user", "a"), said("wizard", "b")], "message 1 has the role 'wizard'; a role is one of system, user,"),
        ([{"content": "a"}], "message 0 has the role None"),
        ([said("user", None)], "message 0 has the content None; the `content` of a message is text"),
        ([said("user", [{"type": "image"}])], r"message 0 has the content \[\{'type': 'image'\}\]"),
        ([said("assistant", "", tool_calls=5)], "message 0: a tool call is 5; it has the form"),
        ([said("assistant", "", tool_calls=[{"function": {}}])], "message 0: a tool call is {'function': {}}; it has"),
    ],
)
def test_malformed_messages_are_named(messages: list[Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        read_messages(messages)


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("calculator", "a tool is 'calculator'; it has the form"),
        (["sum"], "a tool is 'sum'; it has the form"),
        ([{"name": "sum", "parameters": "x"}], "the parameters of 'sum' are 'x'; they are an object, a JSON Schema"),
    ],
)
def test_malformed_tools_are_named(tools: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        read_tools(tools)


def test_older_forms_of_calls_and_results_are_those_of_today() -> None:
    older = [
        said("assistant", None, function_call={"name": "sum", "arguments": '{"a": null}'}),
        said("function", "3", name="sum"),
        said("tool_call", '[{"name": "sum", "arguments": {"a": 1}}]'),
        said("tool_response", "3"),
        sharegpt("function_call", '{"name": "sum", "arguments": {}}'),
        sharegpt("observation", "3"),
        sharegpt("chatgpt", "x"),
    ]
    assert read_messages(older) == [
        said("assistant", "", tool_calls=[{"type": "function", "function": {"name": "sum", "arguments": {"a": None}}}]),
        said("tool", "3", name="sum"),
        said("assistant", "", tool_calls=[{"type": "function", "function": {"name": "sum", "arguments": {"a": 1}}}]),
        said("tool", "3"),
        said("assistant", "", tool_calls=[{"type": "function", "function": {"name": "sum", "arguments": {}}}]),
        said("tool", "3"),
        said("assistant", "x"),
    ]


def test_members_that_only_some_templates_read_stay() -> None:
    assert read_messages([said("assistant", "x", thinking="t", weight=None)]) == [said("assistant", "x", thinking="t")]
    assert read_messages([{"role": "assistant", "reasoning": "r"}]) == [said("assistant", "", reasoning_content="r")]
