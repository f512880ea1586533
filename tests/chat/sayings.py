"""How models write their answers: a message as it is sampled, independently of template and parser."""

from __future__ import annotations

import json


def functions(message):
    """Name and arguments of each call."""
    return [tuple(c["function"].values()) for c in message.get("tool_calls") or ()]


def thoughts(message, opening="<think>\n", closing="\n</think>\n\n"):
    """The thoughts between marks; nothing if there are none."""
    thought = message.get("reasoning_content")
    return "" if thought is None else opening + thought + closing


def opened(message):
    """Thoughts that the prompt has opened."""
    return thoughts(message, opening="")


def hermes(message, think=thoughts):
    calls = (
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in functions(message)
    )
    return think(message) + "\n".join(filter(None, [message["content"], *calls]))


def value_text(value):
    return value if isinstance(value, str) else json.dumps(value)


def parameters(arguments, form):
    """Each argument in this form, of its ``key`` and ``value``."""
    return "".join(form.format(key=k, value=value_text(v)) for k, v in arguments.items())


def xml(message, think=thoughts, mark="tool_call"):
    parts = [message["content"]]
    for name, arguments in functions(message):
        inside = parameters(arguments, "<parameter={key}>\n{value}\n</parameter>\n")
        parts.append(f"<{mark}>\n<function={name}>\n{inside}</function>\n</{mark}>")
    return think(message) + "\n".join(filter(None, parts))


def glm(message):
    parts = [message["content"]]
    for name, arguments in functions(message):
        form = "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        inside = parameters(arguments, form)
        parts.append(f"<tool_call>{name}\n{inside}</tool_call>")
    return thoughts(message, "\n<think>", "</think>\n") + "\n".join(filter(None, parts))


def harmony(message):
    text, lead = "", "<|channel|>"
    if message.get("reasoning_content") is not None:
        text += f"<|channel|>analysis<|message|>{message['reasoning_content']}<|end|>"
        lead = "<|start|>assistant<|channel|>"
    for name, arguments in functions(message):
        body = f"<|constrain|>json<|message|>{json.dumps(arguments)}"
        return f"{text}{lead}commentary to=functions.{name} {body}"
    return f"{text}{lead}final<|message|>{message['content']}"


def deepseek_fenced(message):
    calls = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in functions(message)
    ]
    section = f"<｜tool▁calls▁begin｜>{chr(10).join(calls)}<｜tool▁calls▁end｜>" if calls else ""
    return opened(message) + message["content"] + section


def deepseek_plain(message):
    calls = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in functions(message)
    ]
    section = f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>" if calls else ""
    return message["content"] + section


def dsml(message):
    text = opened(message) + message["content"]
    if not functions(message):
        return text
    text += "\n\n<｜DSML｜function_calls>"
    for name, arguments in functions(message):
        text += f'\n<｜DSML｜invoke name="{name}">'
        for key, value in arguments.items():
            kind = "true" if isinstance(value, str) else "false"
            text += f'\n<｜DSML｜parameter name="{key}" string="{kind}">{value_text(value)}'
            text += "</｜DSML｜parameter>"
        text += "\n</｜DSML｜invoke>"
    return text + "\n</｜DSML｜function_calls>"


def kimi(message):
    calls = [
        f"<|tool_call_begin|>functions.{name}:{k}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments)}<|tool_call_end|>"
        for k, (name, arguments) in enumerate(functions(message))
    ]
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    section = begin + "".join(calls) + end if calls else ""
    return thoughts(message, "<think>", "</think>") + message["content"] + section


def minimax(message):
    text = opened(message) + message["content"]
    if not functions(message):
        return text
    text += "\n<minimax:tool_call>\n"
    for name, arguments in functions(message):
        inside = parameters(arguments, '<parameter name="{key}">{value}</parameter>\n')
        text += f'<invoke name="{name}">\n{inside}</invoke>\n'
    return text + "</minimax:tool_call>"


def mistral_args(message):
    thought = thoughts(message, "[THINK]", "[/THINK]")
    calls = (f"[TOOL_CALLS]{name}[ARGS]{json.dumps(a)}" for name, a in functions(message))
    return thought + message["content"] + "".join(calls)


def cohere(message):
    text = thoughts(message, "<|START_THINKING|>", "<|END_THINKING|>")
    calls = [
        {"tool_call_id": str(k), "tool_name": name, "parameters": arguments}
        for k, (name, arguments) in enumerate(functions(message))
    ]
    if calls:
        return f"{text}<|START_ACTION|>[\n    {json.dumps(calls)[1:-1]}\n]<|END_ACTION|>"
    return f"{text}<|START_RESPONSE|>{message['content']}<|END_RESPONSE|>"


def gemma_value(value):
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_value, value)) + "]"
    return json.dumps(value)


def gemma(message):
    thought = thoughts(message, "<|channel>thought\n", "\n<channel|>")
    calls = (
        f"<|tool_call>call:{name}{gemma_value(a)}<tool_call|>" for name, a in functions(message)
    )
    return thought + message["content"] + "".join(calls)


def llama_json(message):
    for name, arguments in functions(message):
        return json.dumps({"name": name, "parameters": arguments})
    return message["content"]


def python(message, opening="", closing="", think=thoughts):
    calls = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in functions(message)
    ]
    block = f"{opening}[{', '.join(calls)}]{closing}" if calls else ""
    return think(message) + message["content"] + block


def marked_list(opening, closing=""):
    def say(message):
        calls = [{"name": name, "arguments": arguments} for name, arguments in functions(message)]
        block = f"{opening}{json.dumps(calls)}{closing}" if calls else ""
        return thoughts(message) + message["content"] + block

    return say


mistral_list = marked_list("[TOOL_CALLS] ")
