"""Chat templates in the shapes of public model families: how they write roles, tools, calls, results and reasoning.

The texts are our own. What matters is which Jinja features and which members of messages a template reads.
"""

from __future__ import annotations

from typing import Final


def _simple(start: str, end: str, prompt: str, *, before: str = "") -> str:
    """Return a template that writes each message alike: START role MIDDLE content END."""
    head, middle = start.split("ROLE")
    return (
        f"{{{{- {before or repr('')} }}}}{{%- for message in messages %}}"
        f"{{{{- {head!r} + message['role'] + {middle!r} + message['content'] + {end!r} }}}}{{%- endfor %}}"
        f"{{%- if add_generation_prompt %}}{{{{ {prompt!r} }}}}{{% endif %}}"
    )


SHAPES: Final[dict[str, str]] = {
    "chatml": _simple("<|im_start|>ROLE\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
    "zephyr": _simple("<|ROLE|>\n", "</s>\n", "<|assistant|>\n"),
    "yi": _simple("<|im_start|>ROLE\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
    "olmo2": _simple("<|ROLE|>\n", "\n", "<|assistant|>\n", before="bos_token"),
    "falcon3": _simple("<|ROLE|>\n", "\n", "<|assistant|>\n"),
    "phi3": _simple("<|ROLE|>\n", "<|end|>\n", "<|assistant|>\n"),
    "internlm": _simple("<|im_start|>ROLE\n", "<|im_end|>\n", "<|im_start|>assistant\n", before="bos_token"),
    "exaone": _simple("[|ROLE|]", "[|endofturn|]\n", "[|assistant|]"),
    "tulu": _simple("<|ROLE|>\n", "{{ eos_token }}\n", "<|assistant|>\n").replace(
        "'{{ eos_token }}\\n'", "(eos_token if message['role'] == 'assistant' else '') + '\\n'"
    ),
    # Roles must alternate; the system message is a part of the first question.
    "llama2": """\
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}
{% else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}
{%- for message in loop_messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
{%- if loop.index0 == 0 and system != false -%}
{%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] -%}
{%- else -%}{%- set content = message['content'] -%}{%- endif -%}
{%- if message['role'] == 'user' -%}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}
{%- else -%}{{ ' ' + content | trim + ' ' + eos_token }}{%- endif -%}
{%- endfor -%}""",
    "llama3": """\
{% for message in messages %}
{% set content = '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' %}
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}""",
    # A member tool_calls that is there decides, whatever its value is.
    "llama31": """\
{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not tools_in_user_message is defined %}{% set tools_in_user_message = true %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system_message = '' %}{% endif %}
{{- '<|head|>system<|/head|>\\n\\n' + ('Environment: shell\\n' if tools is not none else '') + system_message + '<|eot|>' }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
    {%- else %}{{- raise_exception('tools need a first question') }}{% endif %}
    {{- '<|head|>user<|/head|>\\n\\nCall one of these:\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{% endfor %}
    {{- first + '<|eot|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|head|>assistant<|/head|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot|>' }}
    {%- else %}
        {{- '<|head|>ipython<|/head|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{% endif %}{{- '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}""",
    "llama4": """\
{{- bos_token }}
{%- if tools %}{{- '<|head|>system<|/head|>' }}{% for t in tools %}{{- t | tojson }}{% endfor %}{{- '<|eot|>' }}{% endif %}
{%- for message in messages %}
    {{- '<|head|>' + ('ipython' if message.role == 'tool' else message.role) + '<|/head|>\\n\\n' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}{% for part in message.content %}{{- part.text if part.type == 'text' }}{% endfor %}{% endif %}
    {%- if 'tool_calls' in message and message.tool_calls | length > 0 %}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + '}' }}
        {%- endfor %}{{- '<|eom|>' }}
    {%- else %}{{- '<|eot|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}""",
    "qwen25": """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0]['content'] if messages[0]['role'] == 'system' else 'Be of use.' }}{{- '\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{% endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\n' + (messages[0]['content'] if messages[0]['role'] == 'system' else 'Be of use.') }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') or (message.role == 'system' and not loop.first)
        or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{% endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}""",
    # Reasoning of replies before the last question is left out; enable_thinking may be undefined.
    "qwen3": """\
{%- set ns = namespace(tool=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.tool and message.role == 'user' and not (message.content.startswith('<tool_response>')) %}
        {%- set ns.tool = false %}{% set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- if tools %}{{- '<|im_start|>system\\n' }}{% for tool in tools %}{{- tool | tojson }}{% endfor %}{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.content is string %}{% set content = message.content %}{% else %}{% set content = '' %}{% endif %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}{% set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- content }}{% endif %}
        {%- if message.tool_calls %}{% for call in message.tool_calls %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '<tool_call>' + call.name }}
            {%- if call.arguments is string %}{{- call.arguments }}{% else %}{{- call.arguments | tojson }}{% endif %}
        {%- endfor %}{% endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}""",
    "qwen3-coder": """\
{% macro fields(value, known) %}
    {%- for key in value.keys() | reject('in', known) %}{{- '\\n<' ~ key ~ '>' ~ (value[key] | tojson | safe) }}{% endfor %}
{% endmacro %}
{%- if tools is iterable and tools | length > 0 %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {%- if tool.function is defined %}{% set tool = tool.function %}{% endif %}
        {{- '<function>' ~ tool.name ~ '\\n' ~ tool.description | trim }}
        {%- for name, schema in tool.parameters.properties | items %}{{- '\\n<' ~ name ~ '>' ~ schema.type }}{% endfor %}
        {{- fields(tool.parameters, ['type', 'properties']) }}
    {%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}{{- message.content }}
    {%- if message.tool_calls is defined and message.tool_calls is iterable %}{% for call in message.tool_calls %}
        {{- '\\n<function=' + call.function.name + '>' }}
        {%- for name, value in call.function.arguments | items %}
            {%- set value = value if value is string else value | tojson %}{{- '\\n<' + name + '>' + value }}
        {%- endfor %}
    {%- endfor %}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}""",
    "mistral1": """\
{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}
{%- else %}{{ raise_exception('only user and assistant') }}{% endif %}
{%- endfor %}""",
    # Ids of calls have nine characters; tools stand before the last question.
    "mistral3": """\
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- set questions = rest | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and message == questions[-1] %}
            {{- '[TOOLS][' }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.items() if key != 'return' %}
                    {%- if value is string %}{{- '"' + key + '": "' + value + '"' }}
                    {%- else %}{{- '"' + key + '": ' + value | tojson }}{% endif %}
                    {%- if not loop.last %}{{- ', ' }}{% endif %}
                {%- endfor %}{{- '}}' }}
            {%- endfor %}{{- '][/TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system is defined %}{{- '[INST]' + system + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}{{- '[INST]' + message['content'] + '[/INST]' }}{% endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}{{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}{{- raise_exception('nine characters') }}{% endif %}
            {{- ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] | trim + eos_token }}
    {%- elif message['role'] == 'tool_results' or message['role'] == 'tool' %}
        {%- if message.content is defined and message.content.content is defined %}{% set content = message.content.content %}
        {%- else %}{% set content = message.content %}{% endif %}
        {{- '[RESULT]{"content": ' + content | string + ', "call_id": "' + message.tool_call_id + '"}[/RESULT]' }}
    {%- else %}{{- raise_exception('another role') }}{% endif %}
{%- endfor %}""",
    "mistral-small": """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- if message['content'] is string %}{{- '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}{{- '[INST]' }}{% for block in message['content'] %}{{- block['text'] }}{% endfor %}{{- '[/INST]' }}{% endif %}
    {%- elif message['role'] == 'system' %}{{- '[SYSTEM]' + message['content'] + '[/SYSTEM]' }}
    {%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}
    {%- else %}{{- raise_exception('only user, system and assistant') }}{% endif %}
{%- endfor %}""",
    "gemma2": """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    "gemma3": """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set first = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set first = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set rest = messages[1:] -%}
{%- else -%}{%- set first = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for message in rest -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- else -%}{{ raise_exception('another content') }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}""",
    "phi4": """\
{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|><|end|>' }}
{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}""",
    "deepseek-v2": """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}
{%- elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}""",
    # A message with calls has null content, and arguments are text.
    "deepseek-v3": """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(first=true, tool=false, output_first=true, system='') %}
{%- for message in messages %}{% if message['role'] == 'system' %}{% set ns.system = message['content'] %}{% endif %}{% endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{% set ns.tool = false %}{{- '<|User|>' + message['content'] }}{% endif %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- set ns.tool = false %}
        {%- for tool in message['tool_calls'] %}
            {%- if not ns.first %}{{- '\\n' }}{% else %}{{- '<|Assistant|><|calls|>' }}{% set ns.first = false %}{% endif %}
            {{- '<|call|>' + tool['type'] + '<|sep|>' + tool['function']['name'] + '\\n```json\\n' }}
            {{- '' + tool['function']['arguments'] + '\\n```<|/call|>' }}
        {%- endfor %}{{- '<|/calls|>' + eos_token }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {%- if ns.tool %}{{- '<|/outputs|>' + message['content'] + eos_token }}{% set ns.tool = false %}
        {%- else %}{{- '<|Assistant|>' + message['content'] + eos_token }}{% endif %}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {%- set ns.tool = true %}
        {{- ('<|outputs|>' if ns.output_first else '\\n') + '<|output|>' + message['content'] + '<|/output|>' }}
        {%- set ns.output_first = false %}
    {%- endif %}
{%- endfor %}
{%- if ns.tool %}{{- '<|/outputs|>' }}{% endif %}
{%- if add_generation_prompt and not ns.tool %}{{- '<|Assistant|>' }}{% endif %}""",
    "deepseek-r1": """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] in ['user', 'system'] %}{{- '<|User|>' + message['content'] }}{% endif %}
    {%- if message['role'] == 'assistant' and 'tool_calls' in message %}
        {{- '<|Assistant|>' }}
        {%- if message['content'] is not none %}{{- message['content'] }}{% endif %}
        {%- for tool in message['tool_calls'] %}
            {{- '<|call|>' + tool['function']['name'] + '<|sep|>' + tool['function']['arguments'] + '<|/call|>' }}
        {%- endfor %}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<|Assistant|>' + content + eos_token }}
    {%- elif message['role'] == 'tool' %}{{- '<|output|>' + message['content'] }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{% endif %}""",
    "granite": """\
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set loop_messages = messages[1:] %}
{%- else %}
    {%- set system = 'Be of use.' %}{% set loop_messages = messages %}
    {%- if tools and documents %}{% set system = system + ' Tools and documents.' %}
    {%- elif tools %}{% set system = system + ' Tools.' %}{% endif %}
{%- endif %}
{{- '<|role|>system<|/role|>' + system + '<|eot|>\\n' }}
{%- if tools %}{{- '<|role|>tools<|/role|>' }}{{- tools | tojson(indent=4) }}{{- '<|eot|>\\n' }}{% endif %}
{%- if documents %}{% for document in documents %}{{- document['text'] }}{% endfor %}{% endif %}
{%- for message in loop_messages %}
    {{- '<|role|>' + message['role'] + '<|/role|>' + message['content'] }}
    {%- if message.tool_calls %}{{- '<|tool_call|>' }}{{- message.tool_calls | tojson }}{% endif %}{{- '<|eot|>\\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|role|>assistant' }}{% if controls %}{{- ' ' + controls | tojson }}{% endif %}{{- '<|/role|>' }}
    {%- endif %}
{%- endfor %}""",
    "smollm3": """\
{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}
{%- set mode = '/think' if enable_thinking else '/no_think' %}
{%- if messages[0].role == 'system' %}
    {%- set custom = messages[0].content.replace('/no_think', '').rstrip() %}{% set rest = messages[1:] %}
{%- else %}{% set custom = '' %}{% set rest = messages %}{% endif %}
{{- '<|im_start|>system\\nMode: ' ~ mode ~ '\\n' ~ custom }}
{%- if xml_tools or python_tools or tools %}
    {%- set ns = namespace(text='') %}
    {%- for tool in xml_tools or tools %}{% set ns.text = ns.text ~ (tool.function | string) ~ '\\n' %}{% endfor %}
    {{- '<tools>\\n' + ns.text + '</tools>' }}
{%- endif %}{{- '<|im_end|>\\n' }}
{%- for message in rest %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or message.role == 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {% generation %}{{- '<|im_start|>assistant\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}{% endgeneration %}
    {%- elif message.role == 'tool' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}""",
    "command-r": """\
{%- macro document(doc) -%}{% for key, value in doc.items() if key != 'content' %}{{ key }}: {{ value }}{% endfor %}{%- endmacro -%}
{{- bos_token }}
{%- set ns = namespace(step=0) -%}
{%- if tools %}<|sys|>{% for tool in tools %}{{ tool.function.name }}({% for name, info in tool.function.parameters.properties.items() %}
{{- name }}: {{ 'str' if info.type == 'string' else info.type }}{% if not loop.last %}, {% endif %}{% endfor %}){% endfor %}<|/sys|>{% endif %}
{%- for message in messages %}
    {%- if message.role | lower == 'system' -%}<|sys|>{{ message.content }}<|/sys|>
    {%- elif message.role == 'user' -%}<|user|>{{ message.content | trim }}<|end|>
    {%- elif message.role == 'assistant' or message.role == 'chatbot' -%}
        <|bot|>{% if message.tool_calls -%}
            {%- for tc in message.tool_calls %}
            {"tool_call_id": "{{ ns.step }}", "name": "{{ tc['function']['name'] }}", "parameters": {{ tc['function']['arguments'] | tojson }}}
            {%- set ns.step = ns.step + 1 %}{% endfor %}
        {%- else %}{{ message.content | trim }}{% endif %}<|end|>
    {%- elif message.role == 'tool' -%}<|result|>{{ message.content | tojson }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt -%}<|bot|>{%- endif %}""",
    # Results name the function of the last call; reasoning is in `thinking`.
    "gpt-oss": """\
{%- macro kind(spec) -%}
    {%- if spec.type == 'array' -%}{{ kind(spec['items']) }}[]
    {%- elif spec.type == 'string' and spec.enum -%}{{ '"' + spec.enum | join('" | "') + '"' }}
    {%- else -%}{{ spec.type }}{%- endif -%}
{%- endmacro -%}
{{- '<|start|>system<|message|>Channels: analysis, final.<|end|>' }}
{%- if messages[0].role == 'developer' or messages[0].role == 'system' %}
    {%- set instructions = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set instructions = '' %}{% set rest = messages %}{% endif %}
{%- if instructions or tools %}
    {{- '<|start|>developer<|message|>' + instructions }}
    {%- if tools %}{% for tool in tools %}{% set tool = tool.function %}
        {{- '\\n// ' + tool.description + '\\ntype ' + tool.name + ' = (_: {' }}
        {%- for name, spec in tool.parameters.properties.items() %}
            {{- '\\n' + name + ('?' if name not in (tool.parameters.required or []) else '') + ': ' + kind(spec) }}
        {%- endfor %}{{- '}) => any;' }}
    {%- endfor %}{% endif %}{{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in rest -%}
    {%- if message.role == 'assistant' -%}
        {%- if 'tool_calls' in message -%}
            {%- set call = message.tool_calls[0] -%}{%- if call.function -%}{%- set call = call.function -%}{%- endif -%}
            {%- if message.content and message.thinking -%}{{- raise_exception('content or thinking') -}}{%- endif -%}
            {%- if message.thinking -%}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' -}}{%- endif -%}
            {{- '<|start|>assistant to=functions.' + call.name + '<|message|>' }}{{- call.arguments | tojson }}{{- '<|call|>' }}
            {%- set last.name = call.name -%}
        {%- else -%}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' -}}{%- endif -%}
        {%- if loop.last and not add_generation_prompt -%}{{- '<|return|>' -}}{%- endif -%}
    {%- elif message.role == 'tool' -%}
        {%- if last.name is none -%}{{- raise_exception('a result without a call') -}}{%- endif -%}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|message|>' + message.content | tojson + '<|end|>' -}}
    {%- elif message.role == 'user' -%}{{- '<|start|>user<|message|>' + message.content + '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}""",
    "vicuna": """\
{%- if messages[0]['role'] == 'system' -%}{%- set rest = messages[1:] -%}{%- set system = messages[0]['content'] | trim + '\\n' -%}
{%- else -%}{%- set rest = messages -%}{%- set system = 'A chat.\\n' -%}{%- endif -%}
{{ bos_token + system }}
{%- for message in rest -%}
    {%- if message['role'] == 'user' -%}{{ 'USER: ' + message['content'] | trim + '\\n' }}
    {%- elif message['role'] == 'assistant' -%}{{ 'ASSISTANT: ' + message['content'] | trim + eos_token + '\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}""",
    "hermes": """\
{%- macro type_of(spec) %}
    {%- set types = {'string': 'str', 'number': 'float', 'integer': 'int'} %}
    {%- if spec.type in types %}{{- types[spec.type] }}{% elif spec.type == 'array' %}{{- 'list[' + type_of(spec['items']) + ']' }}
    {%- else %}{{- 'Any' }}{% endif %}
{%- endmacro %}
{{- bos_token }}
{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}
        {%- if tool.function is defined %}{% set tool = tool.function %}{% endif %}
        {{- '{"name": "' + tool.name + '", "description": "' + tool.name + '(' }}
        {%- for name, spec in tool.parameters.properties | items %}{{- name + ': ' + type_of(spec) + ', ' }}{% endfor %}
        {{- ')", "parameters": ' }}{{- tool.parameters | tojson }}{{- '}\\n' }}
    {%- endfor %}{{- '</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls is defined %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{' }}
            {%- if call.function is defined %}{% set call = call.function %}{% endif %}
            {{- '"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>tool\\n' }}{% endif %}
        {{- '<tool_response>' + message.content + ('\\n' if not loop.last else '') + '</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>' }}{% endif %}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}""",
    "nemotron": """\
{{- bos_token }}{%- set ns = namespace(enable_thinking=true) -%}
{%- for message in messages -%}
    {%- if message['role'] == 'user' or message['role'] == 'system' -%}
        {%- if '/no_think' in message['content'] -%}{%- set ns.enable_thinking = false -%}{%- endif -%}
    {%- endif -%}
{%- endfor -%}
{{- '<SPECIAL_10>System\\n' }}
{%- if messages[0]['role'] == 'system' -%}{{- messages[0]['content'].replace('/no_think', '').strip() -}}
{%- set messages = messages[1:] -%}{%- endif -%}
{%- if tools -%}{{- '<AVAILABLE>' -}}{%- for tool in tools -%}{{- (tool.function if tool.function is defined else tool) | tojson -}}
{%- endfor -%}{{- '</AVAILABLE>\\n' -}}{%- endif -%}
{%- for message in messages -%}
    {%- set role = {'user': 'User', 'assistant': 'Assistant', 'tool': 'User'}[message['role']] -%}
    {{- '<SPECIAL_11>' + role + '\\n' + message['content'].strip() -}}
    {%- if message.tool_calls -%}{{- '<TOOLCALL>[' -}}{%- for call in message.tool_calls -%}
        {{- '{"name": "' + call.function.name + '", "arguments": ' -}}
        {%- if call.function.arguments is not string -%}{{- call.function.arguments | tojson -}}
        {%- else -%}{{- call.function.arguments -}}{%- endif -%}{{- '}' + (', ' if not loop.last else '') -}}
    {%- endfor -%}{{- ']</TOOLCALL>' -}}{%- endif -%}{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<SPECIAL_11>Assistant\\n' -}}{%- if not ns.enable_thinking -%}{{- '<think></think>' -}}{%- endif -%}{%- endif -%}""",
    "glm4": """\
[gMASK]<sop>
{%- if tools -%}<|system|>{%- for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}{%- endif -%}
{%- macro visible_text(content) -%}
    {%- if content is string -%}{{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}{%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- endif -%}{%- endfor -%}
    {%- else -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{%- elif m.role == 'assistant' -%}<|assistant|>
{%- set content = visible_text(m.content) %}
{%- if content.strip() -%}{{ '\\n' + content.strip() }}{%- endif -%}
{% if m.tool_calls %}{% for tc in m.tool_calls %}{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
{{ '\\n<tool_call>' + tc.name }}
{% set _args = tc.arguments %}{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% endif %}
{%- elif m.role == 'tool' -%}{%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n' + visible_text(m.content) }}
{%- elif m.role == 'system' -%}<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}{%- endif -%}""",
    "kimi": """\
{%- macro content(message) -%}
    {%- set c = message.get('content') -%}
    {%- if c is string -%}{{ c }}{%- elif c is not none -%}{% for part in c %}{{ part['text'] }}{% endfor %}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}<|im_system|>declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
    {%- if loop.first and messages[0]['role'] != 'system' -%}<|im_system|>system<|im_middle|>Be of use.<|im_end|>{%- endif -%}
    {%- set role = message.get('name') or message['role'] -%}
    <|im_{{ message['role'] }}|>{{ role }}<|im_middle|>
    {%- if message['role'] == 'assistant' and message.get('tool_calls') -%}
        {{- content(message) -}}<|calls|>
        {%- for call in message['tool_calls'] -%}
            {%- set arguments = call['function']['arguments'] -%}
            <|call|>{{ call['id'] }}<|args|>{% if arguments is string %}{{ arguments }}{% else %}{{ arguments | tojson }}{% endif %}<|/call|>
        {%- endfor -%}<|/calls|>
    {%- elif message['role'] == 'tool' -%}## Return of {{ message.tool_call_id }}
{{ content(message) }}
    {%- elif message['content'] is not none -%}{{ content(message) }}{%- endif -%}
    <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}""",
}
