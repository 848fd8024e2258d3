"""Chat templates in the style of model families, and a byte-level tokenizer with their tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from fourfold.errors import InvalidInput
from fourfold.model.conversation import EncodedAnswer, RenderedAnswer, encode_each
from fourfold.model.tokenizer import Tokenizer

SPECIAL: Final = ("<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>")
SPECIAL_MISTRAL: Final = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[CALLS]", "[RESULT]", "[/RESULT]")
ADDED: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # not special
MERGES: Final = ("t h", "th e", "e e", "i n", "a b")

_CALLS = """\
{%- for call in message.tool_calls or [] %}
    {{- '\\n<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
    {{- '\\n</tool_call>' }}
{%- endfor %}
"""
# ChatML with tools in the system message; results of tools follow each other in one user message.
QWEN25: Final = (
    """\
{%- set first = messages[0].content if messages[0].role == 'system' else 'Be helpful.' %}
{{- '<|im_start|>system\\n' + first }}
{%- if tools %}
    {{- '\\nTools:' }}{% for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
"""
    + _CALLS
    + """
        {{- '<|im_end|>\\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
)
# The reasoning of replies before the last question is dropped.
QWEN3: Final = "{%- set asked = namespace(later=false) %}\n" + QWEN25.replace(
    "{{- '<|im_start|>assistant\\n' + message.content }}",
    """{{- '<|im_start|>assistant\\n' }}
        {%- set asked.later = false %}
        {%- for other in messages[loop.index0:] if other.role == 'user' %}{% set asked.later = true %}{% endfor %}
        {%- if message.reasoning_content and not asked.later %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}""",
)
LLAMA3: Final = """\
{{- '<|begin|>' }}
{%- for message in messages %}
    {{- '<|head|>' + message.role + '<|/head|>\\n\\n' }}
    {%- if tools and loop.first %}{{- (tools | tojson(indent=2)) + '\\n' }}{% endif %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}
"""
# The tools stand before the last question. Replies are preceded by a space and end without a line feed.
MISTRAL: Final = """\
{{- '<s>' }}
{%- set last = namespace(user=-1) %}
{%- for message in messages if message.role == 'user' %}{% set last.user = last.user + 1 %}{% endfor %}
{%- set seen = namespace(user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set seen.user = seen.user + 1 %}
        {%- if tools and seen.user == last.user %}{{- '[TOOLS] ' + (tools | tojson) + '[/TOOLS]' }}{% endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[RESULT] ' + message.content + '[/RESULT]' }}
    {%- elif message.tool_calls %}
        {{- '[CALLS] ' }}{% for call in message.tool_calls %}{{- call.function | tojson }}{% endfor %}{{- '</s>' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + '</s>' }}
    {%- endif %}
{%- endfor %}
"""
HERMES: Final = (
    """\
{%- if tools %}{{- '<|im_start|>system\\nFunctions: ' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
"""
    + _CALLS
    + """
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
)
# Arguments are JSON text. The calls of a message are written only if its content is null.
DEEPSEEK: Final = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.content is none %}
        {%- for call in message.tool_calls %}
            {{- '<|begin|>' + call.type + '<|head|>' + call.function.name + '\\n```json\\n' }}
            {{- call.function.arguments + '\\n```<|eot|>' }}
        {%- endfor %}
    {%- else %}
        {{- '<|head|>' + message.role + '<|/head|>' + message.content + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>' }}{% endif %}
{%- if add_generation_prompt and thinking %}{{- '<think>' }}{% endif %}
"""
# Text and calls of one message.
DEEPSEEK_V3: Final = """\
{%- for message in messages %}
    {{- '<|head|>' + message.role + '<|/head|>' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<|begin|>' + call.function.name + '<|head|>' + call.function.arguments }}
    {%- endfor %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>' }}{% endif %}
"""
# (template, text that ends a reply)
FAMILIES: Final = {
    "qwen25": (QWEN25, "<|im_end|>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot|>"),
    "mistral": (MISTRAL, "</s>"),
    "hermes": (HERMES, "<|im_end|>"),
}
TOOL_TEXT: Final = {"deepseek": (DEEPSEEK, "<|eot|>"), "deepseek-v3": (DEEPSEEK_V3, "<|eot|>")}


def family_tokenizer(folder: Path, family: str) -> Tokenizer:
    """Write a model folder with the template of a family, and return its tokenizer."""
    template, end = (FAMILIES | TOOL_TEXT)[family]
    write_tokenizer(folder, template, {"eos_token": end})
    return Tokenizer.load(folder)


def write_tokenizer(folder: Path, template: str, config: Mapping[str, str], special: Sequence[str] = ()) -> None:
    """Write a byte-level tokenizer with the special tokens of all families, and with further ones."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for merge in MERGES:
        vocabulary[merge.replace(" ", "")] = len(vocabulary)
    library = Library(models.BPE(vocab=vocabulary, merges=[(m.split()[0], m.split()[1]) for m in MERGES]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, special=True) for text in (*SPECIAL, *SPECIAL_MISTRAL, *special)])
    library.add_tokens([AddedToken(text, special=False) for text in ADDED])
    library.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def encode_rendered(answers: Sequence[RenderedAnswer], tokenizer: Tokenizer) -> list[EncodedAnswer]:
    """Return samples as tokens; raise the error of the first that has one."""
    encoded = list[EncodedAnswer]()
    for one in encode_each(answers, tokenizer):
        if isinstance(one, InvalidInput):
            raise one
        encoded.append(one)
    return encoded
