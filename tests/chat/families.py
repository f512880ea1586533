"""Chat templates of the most used families, shortened after their published forms."""

# ruff: noqa: E501 - the templates' lines are as long as published

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .sayings import (
    cohere,
    deepseek_fenced,
    deepseek_plain,
    dsml,
    gemma,
    glm,
    harmony,
    hermes,
    kimi,
    llama_json,
    marked_list,
    minimax,
    mistral_args,
    mistral_list,
    opened,
    python,
    thoughts,
    xml,
)
from .templates import Shape


@dataclass(frozen=True)
class Family(Shape):
    """A chat template, and how the model that it belongs to writes its answers."""

    say: Callable[[dict], str] = lambda message: message["content"]
    """Text of a message as it is sampled, without the stop token."""
    calls: bool = True
    """Whether it has a notation for tool calls that its template writes, too."""
    several: bool = True
    """Whether it calls several tools at once."""
    says_and_calls: bool = True
    """Whether it keeps what is said beside a call."""
    call_stop: str | None = None
    """The token that ends an answer that calls, if it is another."""


_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def im(name, template, **fields):
    """A family whose turns stand between ``<|im_start|>`` and ``<|im_end|>``."""
    return Family(name, template, stop=_IM[1], eos=_IM[1], special=_IM, **fields)


_HERMES_TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\n' + (messages[0].content + '\n\n' if messages[0].role == 'system' else '') }}
    {{- '# Tools\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}
    {{- '\n</tools>\nAnswer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}"""
_HERMES_CALLS = """
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}"""
_HERMES_RESULTS = """
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}"""
_HERMES_ASK = """
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

QWEN25 = im(
    "Qwen2.5",
    _HERMES_TOOLS
    + """
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {{- '<|im_start|>assistant\n' + content }}"""
    + _HERMES_CALLS
    + _HERMES_RESULTS
    + _HERMES_ASK,
    say=hermes,
)

_QWEN3 = (
    _HERMES_TOOLS
    + """
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}"""
    + _HERMES_CALLS
    + _HERMES_RESULTS
)

QWEN3 = im(
    "Qwen3",
    _QWEN3
    + """
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}""",
    say=hermes,
    stable=False,
    thinks=True,
)

QWEN3_THINKING = im(
    "Qwen3 Thinking 2507",
    _QWEN3.replace("loop.last or (not loop.last and reasoning_content)", "true")
    + """
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' }}
{%- endif %}""",
    say=lambda message: hermes(message, opened),
    stable=False,
    thinks=True,
    opens=True,
)

_XML_CALLS = """
        {%- for tool_call in message.tool_calls or [] %}
            {%- set tool_call = tool_call.function or tool_call %}
            {{- ('\n' if content and loop.first else '') + '<tool_call>\n<function=' + tool_call.name + '>\n' }}
            {%- for key, value in tool_call.arguments | items %}
                {%- set value = value if value is string else value | tojson %}
                {{- '<parameter=' + key + '>\n' + value + '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' + ('' if loop.last else '\n') }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}"""

QWEN3_CODER = im(
    "Qwen3-Coder",
    _HERMES_TOOLS
    + """
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = (message.content or '') | trim %}
        {{- '<|im_start|>assistant\n' + content }}"""
    + _XML_CALLS
    + _HERMES_RESULTS
    + _HERMES_ASK,
    say=xml,
)

_QWEN35_ANSWER = """
        {%- if loop.index0 > ns.last_query_index %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content + '\n</think>\n\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}"""
_QWEN35 = (
    _QWEN3[: _QWEN3.index("        {%- if loop.index0 > ns.last_query_index %}")]
    + "        {%- set reasoning_content = reasoning_content | trim %}"
    + _QWEN35_ANSWER
    + _XML_CALLS
    + _HERMES_RESULTS
    + """
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- else %}
        {{- '<think>\n' }}
    {%- endif %}
{%- endif %}"""
)
QWEN35 = im(
    "Qwen3.5",
    _QWEN35,
    say=lambda message: xml(message, opened),
    stable=False,
    thinks=True,
    opens=True,
)
QWEN36 = im(
    "Qwen3.6",
    _QWEN35.replace(
        "if loop.index0 > ns.last_query_index",
        "if (preserve_thinking is defined and preserve_thinking is true) or (loop.index0 > ns.last_query_index)",
    ),
    say=lambda message: xml(message, opened),
    stable=False,
    thinks=True,
    opens=True,
)

_NEMOTRON3 = """
{%- set enable_thinking = enable_thinking if enable_thinking is defined else True %}
{%- set truncate_history_thinking = truncate_history_thinking if truncate_history_thinking is defined else True %}
{%- set ns = namespace(last_user_idx = -1) %}
{%- for m in messages %}
  {%- if m["role"] == "user" %}
    {%- set ns.last_user_idx = loop.index0 %}
  {%- endif %}
{%- endfor %}
{%- if messages[0]["role"] != "system" %}{{- "<|im_start|>system\n<|im_end|>\n" }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- if message.reasoning_content is defined and message.reasoning_content is string and message.reasoning_content | trim | length > 0 %}
            {%- set content = "<think>\n" ~ message.reasoning_content ~ "\n</think>\n" ~ (message.content | default('', true)) %}
        {%- else %}
            {%- set content = message.content | default('', true) %}
            {%- if '<think>' not in content and '</think>' not in content -%}
                {%- set content = "<think></think>" ~ content -%}
            {%- endif -%}
        {%- endif %}
        {%- if truncate_history_thinking and loop.index0 < ns.last_user_idx %}
            {%- set content = "<think></think>" ~ content.split('</think>')[-1] | trim %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' ~ (content | trim) }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set tool_call = tool_call.function or tool_call %}
            {{- '\n<tool_call>\n<function=' ~ tool_call.name ~ '>\n' -}}
            {%- for key, value in tool_call.arguments | items %}
                {{- '<parameter=' ~ key ~ '>\n' ~ (value if value is string else value | tojson) ~ '\n</parameter>\n' -}}
            {%- endfor %}
            {{- '</function>\n</tool_call>' -}}
        {%- endfor %}
        {{- '\n' if message.tool_calls }}{{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>user\n' }}{%- endif %}
        {{- '<tool_response>\n' + message.content + '\n</tool_response>\n' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' if enable_thinking else '<|im_start|>assistant\n<think></think>' }}
{%- endif %}"""
NEMOTRON3 = im(
    "Nemotron 3 Nano",
    _NEMOTRON3,
    say=lambda message: xml(message, opened),
    stable=False,
    thinks=True,
    opens=True,
)

_GLM45 = """
{{- '[gMASK]<sop>' }}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set ns.last_user_index = loop.index0 -%}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' -%}{{- '<|user|>\n' + m.content }}
{%- elif m.role == 'assistant' -%}
{{- '<|assistant|>' }}
{%- set reasoning_content = '' %}
{%- set content = m.content %}
{%- if m.reasoning_content is string %}
    {%- set reasoning_content = m.reasoning_content %}
{%- else %}
    {%- if '</think>' in content %}
        {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
{%- endif %}
{%- if loop.index0 > ns.last_user_index and reasoning_content -%}
{{ '\n<think>' + reasoning_content.strip() +  '</think>'}}
{%- else -%}
{{ '\n<think></think>' }}
{%- endif -%}
{%- if content.strip() -%}{{ '\n' + content.strip() }}{%- endif -%}
{%- for tc in m.tool_calls or [] %}
    {%- set tc = tc.function or tc %}
    {{- '\n<tool_call>' + tc.name + '\n' }}
    {%- for k, v in tc.arguments.items() %}
        {{- '<arg_key>' + k + '</arg_key>\n<arg_value>' + (v if v is string else v | tojson) + '</arg_value>\n' }}
    {%- endfor %}
    {{- '</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|observation|>' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- elif m.role == 'system' -%}{{- '<|system|>\n' + m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' }}{{- '\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}"""
_GLM_SPECIAL = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM45 = Family(
    "GLM-4.5",
    _GLM45,
    stop="<|user|>",
    eos="<|endoftext|>",
    special=_GLM_SPECIAL,
    say=glm,
    call_stop="<|observation|>",
    stable=False,
    thinks=True,
)
GLM47 = Family(
    "GLM-4.7",
    _GLM45.replace(
        "if loop.index0 > ns.last_user_index and reasoning_content",
        "if ((clear_thinking is defined and not clear_thinking) or loop.index0 > ns.last_user_index)"
        " and reasoning_content",
    ),
    stop="<|user|>",
    eos="<|endoftext|>",
    special=_GLM_SPECIAL,
    say=glm,
    call_stop="<|observation|>",
    stable=False,
    thinks=True,
)

GPT_OSS = Family(
    "gpt-oss",
    """
{{- '<|start|>system<|message|>You are ChatGPT.\nReasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if messages[0].role == 'developer' or messages[0].role == 'system' %}
    {{- '<|start|>developer<|message|># Instructions\n\n' + messages[0].content + '<|end|>' }}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "content" in message %}
            {%- if "<|channel|>analysis<|message|>" in message.content or "<|channel|>final<|message|>" in message.content %}
                {{- raise_exception("You have passed a message containing <|channel|> tags in the content field.") }}
            {%- endif %}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set future_final_message = namespace(found=false) %}
            {%- for future_message in loop_messages[loop.index:] %}
                {%- if future_message.role == 'assistant' and "tool_calls" not in future_message %}
                    {%- set future_final_message.found = true %}
                {%- endif %}
            {%- endfor %}
            {%- set tool_call = message.tool_calls[0] %}
            {%- if tool_call.function %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {%- if message.content and message.thinking %}
                {{- raise_exception("Cannot pass both content and thinking in an assistant message with tool calls!") }}
            {%- elif message.content and not future_final_message.found %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|end|>" }}
            {%- elif message.thinking and not future_final_message.found %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=" }}
            {{- "functions." + tool_call.name + "<|channel|>commentary " }}
            {{- (tool_call.content_type if tool_call.content_type is defined else "json") + "<|message|>" }}
            {{- tool_call.arguments|tojson }}
            {{- "<|call|>" }}
            {%- set last_tool_call.name = tool_call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last_tool_call.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none %}
            {{- raise_exception("Message has tool role, but there was no previous assistant message with a tool call!") }}
        {%- endif %}
        {{- "<|start|>functions." + last_tool_call.name }}
        {{- " to=assistant<|channel|>commentary<|message|>" + message.content|tojson + "<|end|>" }}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' }}{%- endif -%}""",
    stop="<|return|>",
    eos="<|return|>",
    special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
    say=harmony,
    several=False,
    says_and_calls=False,
    call_stop="<|call|>",
    stable=False,
    thinks=True,
)

_DEEPSEEK_SPECIAL = (
    *(
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>",
    ),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
)
_DEEPSEEK = {
    "stop": "<｜end▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
    "bos": "<｜begin▁of▁sentence｜>",
    "special": _DEEPSEEK_SPECIAL,
}
_DEEPSEEK_R1 = """
{%- set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{%- set ns.system_prompt = message['content'] %}{%- endif %}
{%- endfor %}
{{- bos_token }}{{- ns.system_prompt }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.is_tool = false -%}{{- '<｜User｜>' + message['content'] }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and 'tool_calls' in message %}
        {%- set ns.is_tool = false -%}{%- set ns.is_first = false -%}
        {%- for tool in message['tool_calls'] %}
            {%- if not ns.is_first %}
                {{- '<｜Assistant｜>' + (message['content'] or '') + '<｜tool▁calls▁begin｜>' }}
                {%- set ns.is_first = true -%}
            {%- else %}{{- '\n' }}{%- endif %}
            {{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\n```json\n' }}
            {{- tool['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
        {%- set ns.is_output_first = true %}
    {%- endif %}
    {%- if message['role'] == 'assistant' and 'tool_calls' not in message %}
        {%- if ns.is_tool %}
            {{- '<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}
            {%- set ns.is_tool = false -%}
        {%- else %}
            {%- set content = message['content'] %}
            {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
            {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
        {%- endif %}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {%- set ns.is_tool = true -%}
        {{- '<｜tool▁outputs▁begin｜>' if ns.is_output_first else '\n' }}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
        {%- set ns.is_output_first = false %}
    {%- endif %}
{%- endfor -%}
{%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}"""
DEEPSEEK_R1 = Family(
    "DeepSeek-R1",
    _DEEPSEEK_R1
    + "{%- if add_generation_prompt and not ns.is_tool %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}",
    say=deepseek_fenced,
    stable=False,
    thinks=True,
    opens=True,
    **_DEEPSEEK,
)
DEEPSEEK_V3 = Family(
    "DeepSeek-V3",
    _DEEPSEEK_R1.replace(
        "{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}",
        "",
    )
    + "{%- if add_generation_prompt and not ns.is_tool %}{{- '<｜Assistant｜>' }}{%- endif %}",
    say=deepseek_fenced,
    stable=False,
    **_DEEPSEEK,
)
DEEPSEEK_V31 = Family(
    "DeepSeek-V3.1",
    """
{%- if not thinking is defined %}{%- set thinking = false %}{%- endif %}
{%- set ns = namespace(is_first=false, is_tool=false, system_prompt='', is_last_user=false) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{%- set ns.system_prompt = message['content'] %}{%- endif %}
{%- endfor %}
{{- bos_token }}{{- ns.system_prompt }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.is_tool = false -%}{%- set ns.is_first = false -%}{%- set ns.is_last_user = true -%}
        {{- '<｜User｜>' + message['content'] }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}
        {%- if ns.is_last_user %}{{- '<｜Assistant｜></think>' }}{%- endif %}
        {%- set ns.is_last_user = false -%}{%- set ns.is_first = false -%}{%- set ns.is_tool = false -%}
        {%- for tool in message['tool_calls'] %}
            {%- if not ns.is_first %}
                {{- (message['content'] or '') + '<｜tool▁calls▁begin｜>' }}{%- set ns.is_first = true -%}
            {%- endif %}
            {{- '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and (message['tool_calls'] is not defined or message['tool_calls'] is none) %}
        {%- if ns.is_last_user %}{{- '<｜Assistant｜></think>' }}{%- endif %}
        {%- set ns.is_last_user = false -%}
        {%- if ns.is_tool %}
            {{- message['content'] + '<｜end▁of▁sentence｜>' }}{%- set ns.is_tool = false -%}
        {%- else %}
            {%- set content = message['content'] -%}
            {%- if '</think>' in content %}{%- set content = content.split('</think>', 1)[1] -%}{%- endif %}
            {{- content + '<｜end▁of▁sentence｜>' }}
        {%- endif %}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {%- set ns.is_last_user = false -%}{%- set ns.is_tool = true -%}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor -%}
{%- if add_generation_prompt and ns.is_last_user and not ns.is_tool %}
    {{- '<｜Assistant｜>' }}{{- '<think>' if thinking else '</think>' }}
{%- endif %}""",
    say=deepseek_plain,
    **_DEEPSEEK,
)
DEEPSEEK_V32 = Family(
    "DeepSeek-V3.2",
    """
{%- set last = namespace(user=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content }}
    {%- elif message.role == 'user' %}
        {{- '<｜User｜>' + message.content + '<｜Assistant｜>' }}
        {{- '<think>' if loop.index0 == last.user else '</think>' }}
    {%- elif message.role == 'tool' %}
        {{- '\n\n<function_results>' if messages[loop.index0 - 1].role != 'tool' }}
        {{- '\n<result>' + message.content + '</result>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '\n</function_results>\n\n' + ('<think>' if loop.index0 > last.user else '</think>') }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {%- if loop.index0 > last.user %}{{- (message.reasoning_content or '') + '</think>' }}{%- endif %}
        {{- message.content }}
        {%- if message.tool_calls %}
            {{- '\n\n<｜DSML｜function_calls>' }}
            {%- for call in message.tool_calls %}
                {{- '\n<｜DSML｜invoke name="' + call.function.name + '">' }}
                {%- for key, value in call.function.arguments.items() %}
                    {{- '\n<｜DSML｜parameter name="' + key + '" string="' + ('true' if value is string else 'false') + '">' }}
                    {{- (value if value is string else value | tojson) + '</｜DSML｜parameter>' }}
                {%- endfor %}
                {{- '\n</｜DSML｜invoke>' }}
            {%- endfor %}
            {{- '\n</｜DSML｜function_calls>' }}
        {%- endif %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}""",
    say=dsml,
    stable=False,
    thinks=True,
    opens=True,
    **_DEEPSEEK,
)

_KIMI_SPECIAL = (
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_call_end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    "<|tool_call_argument_begin|>",
)
_KIMI_PARTS = """
{%- macro turn(message) -%}
    {{- '<|im_' + (message.role if message.role in ['user', 'assistant'] else 'system') + '|>' }}
    {{- (message.get('name') or message.role) + '<|im_middle|>' }}
{%- endmacro -%}
{%- macro render_toolcalls(message) -%}
    {{- '<|tool_calls_section_begin|>' }}
    {%- for tool_call in message['tool_calls'] -%}
        {{- '<|tool_call_begin|>' + tool_call['id'] + '<|tool_call_argument_begin|>' }}
        {%- if tool_call['function']['arguments'] is string -%}{{ tool_call['function']['arguments'] }}
        {%- else -%}{{ tool_call['function']['arguments'] | tojson }}{%- endif -%}
        {{- '<|tool_call_end|>' }}
    {%- endfor -%}
    {{- '<|tool_calls_section_end|>' }}
{%- endmacro -%}
{%- if messages[0].role != 'system' -%}{{- '<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>' }}{%- endif -%}
"""
KIMI_K2 = Family(
    "Kimi K2",
    _KIMI_PARTS
    + """
{%- for message in messages -%}
    {{- turn(message) }}
    {%- if message.role == 'assistant' -%}
        {{- message.content or '' }}{%- if message.get('tool_calls') -%}{{- render_toolcalls(message) }}{%- endif -%}
    {%- elif message.role == 'tool' -%}{{- '## Return of ' + message.tool_call_id + '\n' + message.content }}
    {%- else -%}{{- message.content }}{%- endif -%}
    {{- '<|im_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif -%}""",
    stop="<|im_end|>",
    eos="<|im_end|>",
    special=_KIMI_SPECIAL,
    say=kimi,
)
_KIMI_MESSAGE = """
    {{- turn(message) }}
    {%- if message.role == 'assistant' -%}
        {{- THOUGHTS + (message.content or '') }}
        {%- if message.get('tool_calls') -%}{{- render_toolcalls(message) }}{%- endif -%}
    {%- elif message.role == 'tool' -%}{{- '## Return of ' + message.tool_call_id + '\n' + message.content }}
    {%- else -%}{{- message.content }}{%- endif -%}
    {{- '<|im_end|>' }}
{%- endfor -%}"""
KIMI_K2_THINKING = Family(
    "Kimi K2 Thinking",
    _KIMI_PARTS
    + """
{%- set ns = namespace(last_non_tool_call_assistant_msg=-1) -%}
{%- for idx in range(messages|length-1, -1, -1) -%}
    {%- if messages[idx]['role'] == 'assistant' and not messages[idx].get('tool_calls') -%}
        {%- set ns.last_non_tool_call_assistant_msg = idx -%}
        {%- break -%}
    {%- endif -%}
{%- endfor -%}
{%- set hist_msgs = messages[:ns.last_non_tool_call_assistant_msg+1] -%}
{%- set suffix_msgs = messages[ns.last_non_tool_call_assistant_msg+1:] -%}
{%- for message in hist_msgs -%}"""
    + _KIMI_MESSAGE.replace("THOUGHTS", "'<think></think>'")
    + "\n{%- for message in suffix_msgs -%}\n    {%- set rc = message.get('reasoning_content', '') -%}"
    + _KIMI_MESSAGE.replace("THOUGHTS", "'<think>' + rc + '</think>'")
    + "\n{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif -%}",
    stop="<|im_end|>",
    eos="<|im_end|>",
    special=_KIMI_SPECIAL,
    say=kimi,
    stable=False,
    thinks=True,
)

MINIMAX_M2 = Family(
    "MiniMax-M2",
    """
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set ns.last_user_index = loop.index0 -%}
    {%- endif %}
{%- endfor %}
{{- ']~!b[' ~ ']~b]system' ~ '\n' }}
{{- messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' }}{{- '[e~[\n' }}
{%- set last_tool_call = namespace(name=none) -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- ']~b]ai' ~ '\n' }}
        {%- set reasoning_content = '' %}
        {%- set content = message.content %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].strip('\n').split('<think>')[-1].strip('\n') %}
                {%- set content = content.split('</think>')[-1].strip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if reasoning_content and loop.index0 > ns.last_user_index -%}
            {{- '<think>' ~ '\n' ~ reasoning_content ~ '\n' ~ '</think>' ~ '\n\n' }}
        {%- endif -%}
        {%- if content -%}{{- content }}{%- endif -%}
        {%- if message.tool_calls -%}
            {{- '\n<minimax:tool_call>\n' }}
            {%- for tool_call in message.tool_calls -%}
                {%- set tool_call = tool_call.function or tool_call %}
                {{- '<invoke name="' + tool_call.name + '">\n' }}
                {%- for k, v in tool_call.arguments | items %}
                    {{- '<parameter name="' + k + '">' + (v if v is string else v | tojson) + '</parameter>\n' }}
                {%- endfor %}
                {{- '</invoke>\n' }}
            {%- endfor -%}
            {{- '</minimax:tool_call>' }}
            {%- set last_tool_call.name = message.tool_calls[-1].function.name -%}
        {%- else -%}
            {%- set last_tool_call.name = none -%}
        {%- endif -%}
        {{- '[e~[' ~ '\n' }}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none -%}
            {{- raise_exception("Message has tool role, but there was no previous assistant message with a tool call!") }}
        {%- endif -%}
        {%- if messages[loop.index0 - 1].role != 'tool' -%}{{- ']~b]tool' }}{%- endif -%}
        {{- '\n<response>' + message.content + '</response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '[e~[\n' -}}{%- endif -%}
    {%- elif message.role == 'user' -%}
        {{- ']~b]user' ~ '\n' ~ message.content ~ '[e~[' ~ '\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ']~b]ai' ~ '\n' ~ '<think>' ~ '\n' }}{%- endif -%}""",
    stop="[e~[",
    eos="[e~[",
    special=("]~!b[", "]~b]"),
    say=minimax,
    stable=False,
    thinks=True,
    opens=True,
)

_MISTRAL_ALTERNATE = """
{%- set filtered_messages = namespace(turn=0) %}
{%- for message in loop_messages %}
    {%- if message["role"] not in ["tool", "tool_results"] and not message.get("tool_calls") %}
        {%- if (message["role"] == "user") != (filtered_messages.turn % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set filtered_messages.turn = filtered_messages.turn + 1 %}
    {%- endif %}
{%- endfor %}"""
_MISTRAL_HEAD = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- '[SYSTEM_PROMPT]' + messages[0]['content'] + '[/SYSTEM_PROMPT]' }}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}"""
_MISTRAL_SPECIAL = (
    *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
)
MISTRAL = Family(
    "Mistral Small 3.1",
    _MISTRAL_HEAD
    + _MISTRAL_ALTERNATE
    + """
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length < 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length >= 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id[-9:] + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message['role'] == 'assistant' %}
        {{- message['content'] + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}
        {%- if not message.tool_call_id is defined or message.tool_call_id|length < 9 %}
            {{- raise_exception("Tool call IDs should be alphanumeric strings with length >= 9!") }}
        {%- endif %}
        {{- '"call_id": "' + message.tool_call_id[-9:] + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}""",
    stop="</s>",
    eos="</s>",
    bos="<s>",
    special=_MISTRAL_SPECIAL[:7],
    say=mistral_list,
    says_and_calls=False,
)
MAGISTRAL = Family(
    "Magistral 1.2",
    _MISTRAL_HEAD
    + _MISTRAL_ALTERNATE
    + """
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message["role"] == "assistant" %}
        {%- if message.reasoning_content %}{{- '[THINK]' + message.reasoning_content + '[/THINK]' }}{%- endif %}
        {{- message.content or '' }}
        {%- for tool in message.tool_calls or [] %}
            {%- set arguments = tool.function.arguments %}
            {{- '[TOOL_CALLS]' + tool.function.name + '[ARGS]' }}
            {{- arguments if arguments is string else arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS]' + message['content'] + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}""",
    stop="</s>",
    eos="</s>",
    bos="<s>",
    special=_MISTRAL_SPECIAL,
    say=mistral_args,
    thinks=True,
)

COHERE = Family(
    "Command R7B",
    """
{{- bos_token }}
{%- macro call_index(messages, id) %}
    {%- set found = namespace(count=0, index=-1) %}
    {%- for msg in messages %}{%- for tc in msg.tool_calls or [] %}
        {%- if tc.id == id and found.index < 0 %}{%- set found.index = found.count %}{%- endif %}
        {%- set found.count = found.count + 1 %}
    {%- endfor %}{%- endfor %}
    {{- found.index }}
{%- endmacro %}
{%- set tool_idx = namespace(value=0) %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># System Preamble' }}
{%- if messages[0].role == 'system' %}{{- '\n' + messages[0].content }}{%- endif %}{{- '<|END_OF_TURN_TOKEN|>' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + message.content + '<|END_OF_TURN_TOKEN|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
        {%- if message.tool_calls %}
            {{- '<|START_THINKING|>' }}{{- message.reasoning_content }}{{- '<|END_THINKING|><|START_ACTION|>[' }}
            {%- for tc in message.tool_calls %}
                {{- '\n    {"tool_call_id": "' ~ tool_idx.value ~ '", "tool_name": "' + tc.function.name + '", "parameters": ' }}
                {{- tc.function.arguments | tojson + '}' + ('' if loop.last else ',') }}
                {%- set tool_idx.value = tool_idx.value + 1 %}
            {%- endfor %}
            {{- '\n]<|END_ACTION|>' }}
        {%- else %}
            {{- '<|START_RESPONSE|>' + message.content + '<|END_RESPONSE|>' }}
        {%- endif %}
        {{- '<|END_OF_TURN_TOKEN|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[\n' if messages[loop.index0 - 1].role != 'tool' else ',\n' }}
        {{- '    {"tool_call_id": "' + call_index(messages, message.tool_call_id) | trim + '", "results": {"0": ' + message.content | tojson + '}}' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '\n]<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}""",
    stop="<|END_OF_TURN_TOKEN|>",
    eos="<|END_OF_TURN_TOKEN|>",
    bos="<BOS_TOKEN>",
    special=(
        *("<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"),
        *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>"),
    ),
    say=cohere,
    says_and_calls=False,
    thinks=True,
)

GEMMA3 = Family(
    "Gemma 3",
    """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {{- message['content'] | trim }}{{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}""",
    stop="<end_of_turn>",
    eos="<eos>",
    bos="<bos>",
    special=("<start_of_turn>", "<end_of_turn>"),
    calls=False,
)

GEMMA4 = Family(
    "Gemma 4",
    """
{%- macro format_argument(argument) -%}
    {%- if argument is string -%}{{- '<|"|>' + argument + '<|"|>' -}}
    {%- elif argument is boolean -%}{{- 'true' if argument else 'false' -}}
    {%- elif argument is mapping -%}
        {{- '{' -}}{%- for key, value in argument | dictsort -%}
        {{- ',' if not loop.first -}}{{- key + ':' -}}{{- format_argument(value) -}}{%- endfor -%}{{- '}' -}}
    {%- elif argument is sequence -%}
        {{- '[' -}}{%- for item in argument -%}{{- ',' if not loop.first -}}{{- format_argument(item) -}}{%- endfor -%}{{- ']' -}}
    {%- else -%}{{- argument -}}{%- endif -%}
{%- endmacro -%}
{%- macro strip_thinking(text) -%}
    {%- set ns = namespace(result='') -%}
    {%- for part in text.split('<channel|>') -%}
        {%- if '<|channel>' in part -%}{%- set ns.result = ns.result + part.split('<|channel>')[0] -%}
        {%- else -%}{%- set ns.result = ns.result + part -%}{%- endif -%}
    {%- endfor -%}
    {{- ns.result | trim -}}
{%- endmacro -%}
{{- bos_token }}
{%- if messages[0].role == 'system' or tools %}
    {{- '<|turn>system\n' + (messages[0].content | trim if messages[0].role == 'system' else '') + '<turn|>\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1, open=false) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|turn>user\n' + message.content | trim + '<turn|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '' if ns.open else '<|turn>model\n' }}{%- set ns.open = false %}
        {%- set thinking = message.get('reasoning') or message.get('reasoning_content') %}
        {%- if thinking and message.tool_calls and loop.index0 > ns.last_user %}
            {{- '<|channel>thought\n' + thinking + '\n<channel|>' }}
        {%- endif %}
        {{- strip_thinking(message.content or '') if message.tool_calls }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '<|tool_call>call:' + tool_call.function.name -}}{{- format_argument(tool_call.function.arguments) }}{{- '<tool_call|>' }}
        {%- endfor %}
        {%- if message.tool_calls %}{%- set ns.open = true %}
        {%- else %}{{- strip_thinking(message.content) + '<turn|>\n' }}{%- endif %}
    {%- elif message.role == 'tool' %}
        {%- if not ns.open %}{{- raise_exception('a tool response without a tool call') }}{%- endif %}
        {{- '<|tool_response>response:' + (message.name or 'unknown') + '{value:' -}}{{- format_argument(message.content) }}{{- '}<tool_response|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.open %}{{- '<|turn>model\n' }}{%- endif %}""",
    stop="<turn|>",
    eos="<eos>",
    bos="<bos>",
    special=(
        *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
        *("<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>"),
    ),
    say=gemma,
    call_stop="<|tool_response>",
    stable=False,
    thinks=True,
)

_GEMMA4_SAYS = GEMMA4.template[: GEMMA4.template.index("{%- set ns = namespace(last_user")]
GEMMA4_PLAIN = Family(
    "Gemma 4, results before contents",
    _GEMMA4_SAYS
    + """
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|turn>user\n' + message.content | trim + '<turn|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|turn>model\n' }}
        {%- set tool_calls = message.tool_calls or [] %}
        {%- for tool_call in tool_calls %}
            {{- '<|tool_call>call:' + tool_call.function.name -}}{{- format_argument(tool_call.function.arguments) }}{{- '<tool_call|>' }}
        {%- endfor %}
        {%- set ns = namespace(follows=true, answered=false) %}
        {%- for result in messages[loop.index0 + 1:] if tool_calls %}
            {%- if result.role != 'tool' %}{%- set ns.follows = false %}{%- endif %}
            {%- if ns.follows %}
                {%- set ns.answered = true %}
                {{- '<|tool_response>response:' + (result.name or 'unknown') + '{value:' -}}{{- format_argument(result.content) }}{{- '}<tool_response|>' }}
            {%- endif %}
        {%- endfor %}
        {{- strip_thinking(message.content or '') }}
        {{- '' if ns.answered and not message.content else '<turn|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn>model\n' }}{%- endif %}""",
    stop="<turn|>",
    eos="<eos>",
    bos="<bos>",
    special=GEMMA4.special,
    say=gemma,
    call_stop="<|tool_response>",
    stable=False,
)
"""It writes what is said beside a call after the call's result."""

_LLAMA = {
    "stop": "<|eot_id|>",
    "eos": "<|eot_id|>",
    "bos": "<|begin_of_text|>",
    "special": ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"),
}
LLAMA31 = Family(
    "Llama 3.1",
    """
{{- bos_token }}
{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{%- set messages = messages[1:] %}{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {{- message.content | tojson if message.content is mapping else message.content }}{{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}""",
    say=llama_json,
    several=False,
    says_and_calls=False,
    **_LLAMA,
)
LLAMA4 = Family(
    "Llama 4",
    """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|header_start|>ipython<|header_end|>\n\n"' + message.content + '"<|eot|>' }}
    {%- else %}
        {{- '<|header_start|>' + message.role + '<|header_end|>\n\n' }}
        {%- if message.tool_calls %}
            {{- '<|python_start|>' }}{{- message.content or '' }}{{- '<|python_end|>' if message.content }}
            {%- for tool_call in message.tool_calls %}
                {{- '{"name": "' + tool_call.function.name + '", ' + '"parameters": ' }}
                {{- tool_call.function.arguments | tojson + '}' }}
            {%- endfor %}
        {%- else %}{{- message.content }}{%- endif %}
        {{- '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\n\n' }}{%- endif %}""",
    stop="<|eot|>",
    eos="<|eot|>",
    bos="<|begin_of_text|>",
    special=("<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>"),
    say=python,
    says_and_calls=False,
)

PHI4_MINI = Family(
    "Phi-4-mini",
    """
{%- for message in messages %}
    {%- if message.role == 'system' and tools %}
        {{- '<|system|>' + message.content + '<|tool|>' + tools | tojson + '<|/tool|><|end|>' }}
    {%- else %}
        {{- '<|' + message.role + '|>' + (message.content or '') }}
        {%- if message.tool_calls %}
            {{- '<|tool_call|>[' }}
            {%- for call in message.tool_calls %}{{- call.function | tojson + ('' if loop.last else ', ') }}{%- endfor %}
            {{- ']<|/tool_call|>' }}
        {%- endif %}
        {{- '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- else %}{{- eos_token }}{%- endif %}""",
    stop="<|end|>",
    eos="<|endoftext|>",
    special=(
        "<|end|>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|tool_call|>",
        "<|/tool_call|>",
    ),
    say=marked_list("<|tool_call|>", "<|/tool_call|>"),
)
GRANITE = Family(
    "Granite 3.3",
    """
{%- for message in messages %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + (message.content or '') }}
    {%- if message.tool_calls %}
        {{- '<|tool_call|>[' }}
        {%- for call in message.tool_calls %}{{- call.function | tojson + ('' if loop.last else ', ') }}{%- endfor %}
        {{- ']' }}
    {%- endif %}
    {{- '<|end_of_text|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}""",
    stop="<|end_of_text|>",
    eos="<|end_of_text|>",
    special=("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
    say=marked_list("<|tool_call|>"),
)
NEMOTRON2 = im(
    "Nemotron Nano 2",
    """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[1].strip() %}{%- endif %}
        {{- '<|im_start|>assistant\n' + content }}
        {%- if message.tool_calls %}
            {{- '<TOOLCALL>[' }}
            {%- for call in message.tool_calls %}{{- call.function | tojson + ('' if loop.last else ', ') }}{%- endfor %}
            {{- ']</TOOLCALL>' }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<TOOL_RESPONSE>[' + message.content + ']</TOOL_RESPONSE><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}""",
    say=lambda message: (
        marked_list("<TOOLCALL>", "</TOOLCALL>")({**message, "reasoning_content": None})
        if message.get("reasoning_content") is None
        else opened(message)
        + marked_list("<TOOLCALL>", "</TOOLCALL>")({**message, "reasoning_content": None})
    ),
    stable=False,
    thinks=True,
    opens=True,
)
LFM2 = im(
    "LFM2.5",
    """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'tool' %}{{- '<|tool_response_start|>' + message.content + '<|tool_response_end|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if message.thinking %}{{- '<think>\n' + message.thinking + '\n</think>\n\n' }}{%- endif %}
        {{- message.content or '' }}
        {%- if message.tool_calls %}
            {{- '<|tool_call_start|>[' }}
            {%- for call in message.tool_calls %}
                {{- call.function.name + '(' }}
                {%- for key, value in call.function.arguments | items %}
                    {{- key + '=' + ("'" + value + "'" if value is string else value | string) + ('' if loop.last else ', ') }}
                {%- endfor %}
                {{- ')' + ('' if loop.last else ', ') }}
            {%- endfor %}
            {{- ']<|tool_call_end|>' }}
        {%- endif %}
    {%- else %}{{- message.content }}{%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
    say=lambda message: python(message, "<|tool_call_start|>", "<|tool_call_end|>"),
    thinks=True,
)
SEED = Family(
    "Seed-OSS",
    """
{%- for message in messages %}
    {{- '<seed:bos>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content %}
            {{- '<seed:think>' + message.reasoning_content + '</seed:think>' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<seed:tool_call>\n<function=' + call.function.name + '>\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>' + (value if value is string else value | tojson) + '</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</seed:tool_call>' }}
        {%- endfor %}
    {%- else %}{{- message.content }}{%- endif %}
    {{- '<seed:eos>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<seed:bos>assistant\n' }}{%- endif %}""",
    stop="<seed:eos>",
    eos="<seed:eos>",
    special=("<seed:bos>",),
    say=lambda message: xml(
        message, lambda m: thoughts(m, "<seed:think>", "</seed:think>"), "seed:tool_call"
    ),
    thinks=True,
)

FAMILIES = [
    *(QWEN25, QWEN3, QWEN3_THINKING, QWEN3_CODER, QWEN35, QWEN36, GLM45, GLM47, GPT_OSS),
    *(DEEPSEEK_V3, DEEPSEEK_R1, DEEPSEEK_V31, DEEPSEEK_V32, KIMI_K2, KIMI_K2_THINKING, MINIMAX_M2),
    *(MISTRAL, MAGISTRAL, COHERE, GEMMA3, GEMMA4, LLAMA31, LLAMA4, NEMOTRON2, NEMOTRON3),
    *(PHI4_MINI, GRANITE, LFM2, SEED),
]
