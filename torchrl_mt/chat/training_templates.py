"""Chat templates for training: a family's own template, changed not to rewrite earlier messages.

A training template renders the opening like the original, but keeps the thoughts of earlier turns, so
that an episode is one row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torchrl_mt.chat.assistant_messages import THOUGHT, name_tool_results, trial_call
from torchrl_mt.chat.prefix_stability import find_break
from torchrl_mt.chat.replies import ParsedReply
from torchrl_mt.chat.template import OPENINGS, TOOL_RESULT, ChatTemplate

__all__ = ["training_template"]

_LAST = r"\w*(?:last|user|query)\w*(?:\.\w+)?|\w+\.\w*(?:last|user|query)\w*"
_INDEX = r"\b(?:loop\.index0|msg_index|index|idx)"
_SWITCHES = {
    "preserve_thinking": "true",
    "clear_thinking": "false",
    "truncate_history_thinking": "false",
}
"""Variables that make templates keep thoughts (Qwen3.6, GLM-4.7, Nemotron 3)."""

_FIXES: tuple[tuple[str, str], ...] = (
    # Qwen3, Qwen3.5, GLM, MiniMax, DeepSeek V3.2: thoughts only after the user's last message.
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


def training_template(original: ChatTemplate) -> tuple[ChatTemplate, str | None]:
    """Make the training template of a chat template.

    Returns:
        A template that renders the same openings (``original`` if nothing needs to change), and the
        result of :func:`~torchrl_mt.chat.prefix_stability.find_break` for it.

    Raises:
        ValueError: if no known change works for this template.
    """
    breaks = find_break(original)
    if breaks is None and not original.answers.drops_thoughts:
        return original, None
    changed = []
    for source in _candidates(original.source, original.answers.thought_field is not None):
        try:
            template = original.with_source(source)
        except Exception:  # The changed source may not be a valid template.
            continue
        if _begins_alike(template, original):
            changed.append(template)
    # Breaks in dialogues with tools are accepted if there is nothing better.
    found = [
        (each, find_break(each))
        for each in [original, *changed]
        if find_break(each, with_tools=False) is None
    ]
    if found:
        return min(found, key=lambda pair: (pair[1] is not None, pair[0].answers.drops_thoughts))
    raise ValueError(
        f'template="training" must be given for a chat template that can be kept from rewriting '
        f'dialogues, got one that cannot: {breaks}. Use on_break="append", which keeps '
        "every turn in view as well, or set tokenizer.chat_template to one that does not."
    )


def _candidates(source: str, takes_thoughts: bool) -> list[str]:
    """Changed sources of a template, the smallest change first; empty if no known change applies."""
    fixed = source
    for pattern, replacement in _FIXES:
        fixed = re.sub(pattern, replacement, fixed)
    if not takes_thoughts:
        fixed = re.sub(_STRIPPED, "", fixed)
    switches = [
        f"{{% set {name} = {value} %}}" for name, value in _SWITCHES.items() if name in source
    ]
    if switches:
        # The empty text keeps a line break at the beginning of the template.
        fixed = "".join([*switches, "{{ '' }}", fixed])
    found = [fixed, re.sub(*_FIRST, fixed)]
    return [each for each in dict.fromkeys(found) if each != source]


def _begins_alike(changed: ChatTemplate, original: ChatTemplate) -> bool:
    """Whether two templates render openings alike, and tool turns where the original is stable."""

    def prompts(template: ChatTemplate, dialogues: list[list[Mapping[str, Any]]]) -> list[Any]:
        return [template.renders(each, add_generation_prompt=True) for each in dialogues]

    openings: list[list[Mapping[str, Any]]] = [list(opening) for opening in OPENINGS]
    if prompts(changed, openings) != prompts(original, openings):
        return False
    answers, call = changed.answers, trial_call(0, changed.parser.family)
    results = name_tool_results({"tool_calls": [call]}, [TOOL_RESULT])
    # Thoughts in the content are left out: here training templates differ on purpose.
    thoughts = (None, THOUGHT) if answers.thought_field else (None,)
    said = [answers.write(ParsedReply("", thought, [call])) for thought in thoughts]
    told = [[*changed.question, answer, *results * k] for answer in said for k in (1, 2)]
    (asked,) = prompts(original, [[*changed.question]])
    pairs = zip(prompts(changed, told), prompts(original, told), strict=True)
    return all(
        ours == theirs or theirs is None or not theirs.startswith(asked or "")
        for ours, theirs in pairs
    )
