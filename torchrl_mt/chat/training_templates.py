"""Chat templates for training: a family's own, without what makes it rewrite a dialogue as it grows.

A training template renders a dialogue's opening as the original does. From then on it keeps the thoughts
of earlier turns, so that an episode is one row.
"""

from __future__ import annotations

import re

__all__ = ["candidates"]

_LAST = r"\w*(?:last|user|query)\w*(?:\.\w+)?|\w+\.\w*(?:last|user|query)\w*"
_INDEX = r"\b(?:loop\.index0|msg_index|index|idx)"
_SWITCHES = {
    "preserve_thinking": "true",
    "clear_thinking": "false",
    "truncate_history_thinking": "false",
}
"""Variables by which templates keep thoughts themselves (Qwen3.6, GLM-4.7, Nemotron 3)."""

_FIXES: tuple[tuple[str, str], ...] = (
    # Qwen3, Qwen3.5, GLM, MiniMax, DeepSeek V3.2: thoughts only behind the user's last message.
    (rf"{_INDEX}\s*(?:>=?|==)\s*(?:{_LAST})\b", "true"),
    (rf"{_INDEX}\s*<=?\s*(?:{_LAST})\b", "false"),
    # Gemma 4: thoughts only where a tool is called.
    (r"(\bthink\w*) and (?:message\.tool_calls|message\.get\('tool_calls'\)) and true\b", r"\1"),
    (r"(\bthink\w*) and true and (?:message\.tool_calls|message\.get\('tool_calls'\))", r"\1"),
    # Qwen3: an empty thought only in the last answer, or where the prompt has written it.
    (
        r"loop\.last or \(not loop\.last and reasoning_content\)",
        "reasoning_content or (enable_thinking is defined and enable_thinking is false)",
    ),
    # Kimi K2 Thinking: the dialogue up to the last answer that calls no tool.
    (r"messages\[:\s*ns\.last_non_tool_call_assistant_msg\s*\+\s*1\]", "messages[:0]"),
    (r"messages\[ns\.last_non_tool_call_assistant_msg\s*\+\s*1:\]", "messages"),
    # gpt-oss: thoughts only in the last answer, and before calls that no answer has followed.
    (r"(?:el)?if loop\.last and not add_generation_prompt\b", "elif true"),
    (r" and not future_final_message\.found\b", ""),
    # Mistral: tools before the user's last message.
    (r"\buser_messages\[-1\]", "user_messages[0]"),
)
_STRIPPED = (
    r"\.split\(\s*(['\"])</think>\1(?:,\s*1)?\)\[(?:-1|1)\](?:\.[lr]?strip\([^()]*\)|\s*\|\s*trim)?"
)
"""DeepSeek R1, Nemotron Nano 2: the text of an answer without its thoughts."""
_FIRST = (r"\bloop\.last\b", "loop.first")
"""Mistral: the rules before the user's last message."""


def candidates(source: str, *, reads_thoughts: bool) -> list[str]:
    """Templates that may be a training template of this one, to be tried in order.

    Args:
        source: a chat template.
        reads_thoughts: whether it has a field for thoughts; else it finds them in the text.

    Returns:
        Sources, the most careful first; none if there is nothing known to be changed.
    """
    fixed = source
    for pattern, replacement in _FIXES:
        fixed = re.sub(pattern, replacement, fixed)
    if not reads_thoughts:
        fixed = re.sub(_STRIPPED, "", fixed)
    switches = [
        f"{{% set {name} = {value} %}}" for name, value in _SWITCHES.items() if name in source
    ]
    if switches:
        # The empty text keeps a line's end that a template may begin with.
        fixed = "".join([*switches, "{{ '' }}", fixed])
    found = [fixed, re.sub(*_FIRST, fixed)]
    return [each for each in dict.fromkeys(found) if each != source]
