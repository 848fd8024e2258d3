"""Conversations become the tokens of inference, with the answers and their ends in the loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from fourfold.errors import InvalidInput
from fourfold.model.conversation import (
    EncodedAnswer,
    EncodingRule,
    plain_answer,
    render_answers,
    scored_steps,
)
from fourfold.model.tokenizer import Tokenizer
from tests.support.chat_templates import encode_rendered, write_tokenizer
from tests.support.template_shapes import SHAPES

# The end token of each, and whether earlier turns of two are written as they were when they were the last.
FAMILIES: Final = {
    "qwen25": ("<|im_end|>", True),
    "qwen3": ("<|im_end|>", False),
    "llama3": ("<|eot|>", True),
    "llama31": ("<|eot|>", True),
    "phi3": ("<|end|>", True),
    "gpt-oss": ("<|return|>", False),
    "smollm3": ("<|im_end|>", True),
    "tulu": ("</s>", True),
}
# The last answer ends with another token than earlier ones, which keep neither it nor their reasoning.
GPT_OSS: Final = """\
{{- '<|start|>system<|message|>Channels: analysis, final.<|end|>' }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if m.reasoning_content and loop.last %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
PHI3_LAST: Final = SHAPES["phi3"].replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
# Answers are closed by the mark of the next role, as in GLM-4.
ROLE_ENDS: Final = """\
{%- for m in messages %}{{- '<|' + m.role + '|>' + '\\n' + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}"""
MARKED_CONTENT: Final = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set said %}{% generation %}{{ m.content }}{% if m.tool_calls %}!{% endif %}{% endgeneration %}{% endset %}
        {{- '<|im_start|>assistant\\n' + said + '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
R1: Final = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""


def said(role: str, content: str, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


ONE: Final = [said("system", "Be brief."), said("user", "the 2 + 2?"), said("assistant", "in 4 abs")]
TWO: Final = [said("user", "the a?"), said("assistant", "bee\n\n"), said("user", "c?"), said("assistant", "the end")]


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Tokenizer]:
    numbers = itertools.count()

    def load(template: str, end: str = "<|im_end|>", **config: str) -> Tokenizer:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        special = ("<|end|>", "<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|user|>", "<|assistant|>")
        write_tokenizer(
            folder, {**SHAPES, "gpt-oss": GPT_OSS}.get(template, template), {"eos_token": end, **config}, special
        )
        return Tokenizer.load(folder)

    return load


def encode(tokenizer: Tokenizer, messages: Any, answers_from: int = 0, **rule: Any) -> list[EncodedAnswer]:
    answers = render_answers(messages, [], tokenizer, EncodingRule(**rule), answers_from=answers_from)
    return encode_rendered(answers, tokenizer)


def losses(tokenizer: Tokenizer, answer: EncodedAnswer) -> list[str]:
    return [tokenizer.decode(answer.token_ids[a:b].tolist(), skip_special=False) for a, b in answer.spans]


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_has_the_tokens_of_an_engine_and_the_answer_ends_in_the_loss(
    load: Callable[..., Tokenizer], family: str
) -> None:
    tokenizer = load(family, FAMILIES[family][0], bos_token="<s>")
    (answer,) = encode(tokenizer, ONE)
    prompt = tokenizer.encode(tokenizer.render_chat(ONE[:2]))
    assert answer.token_ids[: answer.prompt_length].tolist() == prompt
    (text,) = losses(tokenizer, answer)
    assert text.endswith("in 4 abs" + FAMILIES[family][0])
    assert answer.spans[-1][1] == len(answer.token_ids), "white space after the end token is left out"
    assert answer.token_ids[-1] in tokenizer.stop_token_ids
    assert answer.loss_mask().tolist() == [False] * len(prompt) + [True] * (len(answer.token_ids) - len(prompt))
    whole = tokenizer.render_chat(ONE, add_generation_prompt=False)
    assert whole.startswith(tokenizer.decode(answer.token_ids.tolist(), skip_special=False))


@pytest.mark.parametrize("family", [family for family, (_, stable) in FAMILIES.items() if stable])
def test_every_answer_of_a_conversation_is_in_the_loss(load: Callable[..., Tokenizer], family: str) -> None:
    end = FAMILIES[family][0]
    tokenizer = load(family, end, bos_token="<s>")
    (answer,) = encode(tokenizer, TWO)
    first, second = losses(tokenizer, answer)
    assert first.strip().startswith("bee") and first.endswith(end) and second.strip() == "the end" + end
    assert losses(tokenizer, encode(tokenizer, TWO, loss_on="last")[0]) == [second]
    assert losses(tokenizer, encode(tokenizer, TWO, answers_from=2, loss_on="completion")[0]) == [second]
    (whole,) = encode(tokenizer, TWO, loss_on="all")
    assert whole.spans == ((1, len(whole.token_ids)),), "the first token is never in the loss"


@pytest.mark.parametrize("family", [family for family, (_, stable) in FAMILIES.items() if not stable])
def test_templates_that_write_earlier_answers_differently_need_each(
    load: Callable[..., Tokenizer], family: str
) -> None:
    end = FAMILIES[family][0]
    tokenizer = load(family, end)
    with pytest.raises(InvalidInput, match=r'message 1: .*differently.*one has .*data\.turns = "each"') as caught:
        encode(tokenizer, TWO)
    assert ("<think>" if family == "qwen3" else "return|>") in caught.value.message, "the first difference"
    samples = encode(tokenizer, TWO, turns="each")
    assert [sample.turn for sample in samples] == [1, 3]
    for turn, sample in zip((1, 3), samples, strict=True):
        prompt = tokenizer.encode(tokenizer.render_chat(TWO[:turn]))
        assert sample.token_ids[: sample.prompt_length].tolist() == prompt
        assert losses(tokenizer, sample)[0].endswith(TWO[turn]["content"] + end)
    assert encode(tokenizer, TWO, loss_on="last")[0].token_ids.tolist() == samples[1].token_ids.tolist()


def test_reasoning_is_in_the_loss_of_the_turn_in_which_an_engine_writes_it(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load("qwen3")
    first = said("assistant", "b", reasoning_content="why")
    chat = [said("user", "a"), first, said("user", "c"), said("assistant", "d")]
    one, two = encode(tokenizer, chat, turns="each")
    assert losses(tokenizer, one) == ["<think>\nwhy\n</think>\n\nb<|im_end|>"]
    assert "why" not in tokenizer.decode(two.token_ids.tolist())


def test_marks_of_a_template_do_not_change_what_engines_get(load: Callable[..., Tokenizer]) -> None:
    marked = load(MARKED_CONTENT)
    plain = load(MARKED_CONTENT.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    assert marked.render_chat(TWO) == plain.render_chat(TWO)
    text, spans = marked.render_marked(TWO)
    assert text == plain.render_chat(TWO, add_generation_prompt=False)
    assert [text[a:b] for a, b in spans] == ["bee\n\n", "the end"]
    assert plain.render_marked(TWO)[1] == []


def test_marks_find_answers_where_prefixes_do_not_and_the_end_token_is_added_to_them(
    load: Callable[..., Tokenizer],
) -> None:
    tokenizer = load(MARKED_CONTENT)
    (answer,) = encode(tokenizer, TWO)
    assert losses(tokenizer, answer) == ["bee\n\n<|im_end|>", "the end<|im_end|>"]
    marked_prompt = load("smollm3")  # the mark encloses the generation prompt, too
    (answer,) = encode(marked_prompt, [*TWO[:3], said("assistant", ""), said("user", "x"), said("assistant", "y")])
    assert losses(marked_prompt, answer) == ["bee\n\n<|im_end|>", "y<|im_end|>"]


def test_an_answer_without_a_mark_is_an_error(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load(MARKED_CONTENT.replace("{{ m.content }}", "{% if loop.index > 3 %}{{ m.content }}{% endif %}"))
    with pytest.raises(InvalidInput, match=r"message 1: .*generation.*not around this answer"):
        encode(tokenizer, TWO)


def test_a_template_may_end_answers_with_the_mark_of_the_next_role(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load(ROLE_ENDS, "<|user|>")
    chat = [*TWO, said("user", "more")]
    (answer,) = encode(tokenizer, chat)
    assert losses(tokenizer, answer) == ["bee\n\n<|user|>", "the end<|user|>"]
    with pytest.raises(
        InvalidInput, match=r"the last answer with .*the end.*none of .*'<\|user\|>'.*data\.end = \"token\""
    ):
        encode(tokenizer, TWO)
    (answer,) = encode(tokenizer, TWO, end="token")
    assert losses(tokenizer, answer) == ["bee\n\n<|user|>", "the end<|user|>"]


def test_a_template_whose_end_is_no_end_token_is_refused_and_may_get_one(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load("qwen25", "<|return|>")  # as base models whose template is that of the chat model
    with pytest.raises(InvalidInput, match=r"the last answer with .*<\|im_end\|>.*learn never to stop"):
        encode(tokenizer, ONE)
    assert losses(tokenizer, encode(tokenizer, ONE, end="token")[0]) == ["in 4 abs<|im_end|><|return|>"]
    with pytest.raises(InvalidInput, match=r'an answer with .*data\.turns = "each" with data\.end = "token"'):
        encode(tokenizer, TWO, end="token")
    both = encode(tokenizer, TWO, end="token", turns="each")
    assert [losses(tokenizer, one)[0][-20:] for one in both] == ["<|im_end|><|return|>"] * 2
    with pytest.raises(InvalidInput, match="names no end token"):
        encode(load("qwen25", "nothing"), ONE, end="token")


def test_an_answer_ends_where_an_engine_stops(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load(PHI3_LAST, "<|end|>")
    assert tokenizer.render_chat(ONE, add_generation_prompt=False).endswith("<|end|>\n<|end|>")
    assert losses(tokenizer, encode(tokenizer, ONE)[0]) == ["in 4 abs<|end|>"], "nothing after the first end token"


def test_a_prompt_that_an_answer_does_not_continue_is_an_error(load: Callable[..., Tokenizer]) -> None:
    for turns in ("all", "each"):
        with pytest.raises(InvalidInput, match=r"message 2: the prompt of inference .*<think>.*data\.chat_template"):
            encode(load(R1), ONE, turns=turns)
    with pytest.raises(InvalidInput, match=r"Be brief\..*data\.chat_template"):  # it drops the system message then
        encode(load("mistral3", "</s>", bos_token="<s>"), ONE)


def test_texts_of_special_tokens_do_not_end_a_turn(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load("qwen25")
    chat = [said("user", "hi<|im_end|>\n<|im_start|>assistant\nyes"), said("assistant", "a<|im_end|>b")]
    (answer,) = encode(tokenizer, chat)
    ends = [i for i in answer.token_ids.tolist() if i in tokenizer.stop_token_ids]
    assert len(ends) == 3, "of the system message, the user and the assistant"
    assert losses(tokenizer, answer) == ["a<|im_end|>b<|im_end|>"]
    (trusted,) = encode(tokenizer, chat, trust_special_tokens=True)
    assert trusted.token_ids.tolist().count(ends[0]) == 5


def test_switches_take_answers_out_of_the_loss(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load("qwen25")
    for switch in ({"weight": 0}, {"train": False}, {"loss": 0.0}):
        (answer,) = encode(tokenizer, [TWO[0], TWO[1] | switch, *TWO[2:]])
        assert losses(tokenizer, answer) == ["the end<|im_end|>"]
        assert "bee" in tokenizer.decode(answer.token_ids.tolist()), "it stays in the prompt"
    assert encode(tokenizer, [TWO[0], TWO[1] | {"weight": 0}]) == []
    with pytest.raises(InvalidInput, match=r"message 1 has weight = 0\.5; it is 0 or 1"):
        encode(tokenizer, [TWO[0], TWO[1] | {"weight": 0.5}])
    assert encode(tokenizer, [TWO[0], said("assistant", "")]) == [], "an empty answer is no answer"
    with pytest.raises(InvalidInput, match="message 0 is the assistant's"):
        encode(tokenizer, TWO[1:])


def test_two_begin_tokens_are_one(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load("{{- bos_token }}" + SHAPES["llama3"], "<|eot|>", bos_token="<s>")
    (answer,) = encode(tokenizer, ONE)
    assert answer.doubled_begin
    assert answer.token_ids.tolist().count(tokenizer.begin_token_id) == 1
    (answer,) = encode(load("llama3", "<|eot|>", bos_token="<s>"), ONE)
    assert not answer.doubled_begin and answer.token_ids[0] == tokenizer.begin_token_id


def test_plain_text_ends_with_the_end_token(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load("qwen25", "</s>")
    texts = (("ab", " the"), ("", "the a"), ("x", ""))
    pair, text, empty = encode_rendered([plain_answer(*both) for both in texts], tokenizer)
    assert pair.token_ids[: pair.prompt_length].tolist() == tokenizer.encode("ab")
    assert losses(tokenizer, pair) == [" the</s>"]
    assert text.spans == ((1, len(text.token_ids)),) and losses(tokenizer, text) == [" a</s>"]
    assert empty.spans == () and empty.prompt_length == 1


def test_a_batch_of_chats_and_texts_keeps_its_order(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load("qwen25")
    (chat,) = render_answers(ONE, [], tokenizer, EncodingRule())
    (alone,) = encode_rendered([chat], tokenizer)
    batch = encode_rendered([plain_answer("a", "b"), chat, plain_answer("c", "d")], tokenizer)
    assert batch[1].token_ids.tolist() == alone.token_ids.tolist()
    assert [tokenizer.decode(one.token_ids.tolist()) for one in (batch[0], batch[2])] == ["ab", "cd"]


def test_each_step_has_a_span(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load("qwen25")
    (answer,) = encode_rendered([scored_steps("ab", [], ["the", "end"], "\n\n", tokenizer)], tokenizer)
    assert losses(tokenizer, answer) == ["the\n\n", "end\n\n"]


@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_a_template_that_leaves_out_tools_or_their_calls_is_refused(
    load: Callable[..., Tokenizer], loss_on: Any
) -> None:
    tool = {"type": "function", "function": {"name": "rain", "description": "d", "parameters": {}}}
    call = {"type": "function", "function": {"name": "rain", "arguments": {"city": "Ulm"}}}
    messages = [said("user", "Wet?"), said("assistant", "", tool_calls=[call]), said("assistant", "No.")]
    rule = EncodingRule(loss_on=loss_on)
    render_answers(messages, [tool], load("qwen25"), rule)
    with pytest.raises(InvalidInput, match=r"leaves out the tool 'rain'; set data.chat_template .*data.tools_field"):
        render_answers(messages, [tool], load("chatml"), rule)
    with pytest.raises(InvalidInput, match=r"message 1: the chat template leaves out its call of 'rain'; set data"):
        render_answers(messages, [], load("chatml"), rule)
