"""Actions on a computer, as a model writes them: ``<|action_start|>click(0.5, 0.5)<|action_end|>``.

Any text becomes actions or an :class:`ActionError`, in time linear in its length. Nothing is guessed:
what is not an action is never read as another one. ``str(action)`` is parsed back into the same action.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchrl_mt.bridges.cua_bench.call_syntax import (
    ActionError,
    Value,
    Word,
    after,
    as_written,
    in_quotes,
    read_arguments,
    shown,
)
from torchrl_mt.checks import check_choice

__all__ = [
    "ACTION_FORMATS",
    "MAX_WAIT",
    "Action",
    "ActionError",
    "describe_actions",
    "parse_actions",
]

ACTION_FORMATS: Mapping[str, tuple[str, str]] = {
    "tagged": ("<|action_start|>", "<|action_end|>"),
    "think": ("<action>", "</action>"),
}
"""Where actions begin and end in a response, by format."""

MAX_WAIT = 60.0
"""Most seconds of a ``wait``, and of all in one response."""
_MAX_AMOUNT = 10_000
_DIRECTIONS = ("up", "down")

_FORMS = {
    "click": ("click(0.5, 0.5)", "left click at x, y"),
    "left_double": ("left_double(0.5, 0.5)", "double click"),
    "right_single": ("right_single(0.5, 0.5)", "right click"),
    "drag": ("drag(0.1, 0.2, 0.8, 0.9)", "drag from x, y to x2, y2"),
    "hotkey": ('hotkey("ctrl", "c")', "press keys together"),
    "key": ('key("enter")', "press a key"),
    "type": (r'type("some text\n")', r"type text; write \n, \t, \" and \\ in it"),
    "scroll": ("scroll(0.5, 0.5, down, 300)", "scroll up or down; 100 is a notch and the default"),
    "wait": ("wait(2)", f"wait for seconds, 1 if none are given, at most {MAX_WAIT:.0f} in all"),
    "call_user": ("call_user()", "ask the user for help; no user may be there"),
    "done": ("done()", "end the task and have it judged"),
}
"""An example and the meaning of every action."""

_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("click", "left_double", "right_single"), ("x", "y")),
    "drag": ("x", "y", "x2", "y2"),
    "hotkey": ("keys",),
    "key": ("key",),
    "type": ("text",),
    "scroll": ("x", "y", "direction", "amount"),
    "wait": ("seconds",),
    "call_user": (),
    "done": (),
}
_OPTIONAL = {"scroll": {"x", "y", "amount"}, "wait": {"seconds"}}
_ALIASES = {"x1": "x", "y1": "y", "content": "text"}
_COORDINATES = ("x", "y", "x2", "y2")
_POINTS = {
    **dict.fromkeys(("point", "start_point", "start_box"), ("x", "y")),
    **dict.fromkeys(("end_point", "end_box"), ("x2", "y2")),
}
"""Keywords whose value is a point or a box, and the coordinates that these become."""

_THOUGHTS = {"<think>": "</think>", "<|think_start|>": "<|think_end|>"}
_BETWEEN_CALLS = re.compile(r"[\s;]*")
_CALL = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*\(")
_NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_KEY = re.compile("\\+|[^+\\s\ud800-\udfff]+")
_BOX_TAGS = re.compile(r"<[^<>]*>|[\[\]()]")


@dataclass(frozen=True)
class Action:
    """An action on a computer.

    Args:
        name: ``"click"``, ``"left_double"``, ``"right_single"``, ``"drag"``, ``"hotkey"``, ``"key"``,
            ``"type"``, ``"scroll"``, ``"wait"``, ``"call_user"`` or ``"done"``.
        arguments: what the action needs: ``x``, ``y``, ``x2`` and ``y2`` as fractions of the screen in
            [0, 1], ``text``, ``keys`` (a list), ``key``, ``direction`` (``"up"`` or ``"down"``),
            ``amount`` (hundredths of a notch of the wheel) and ``seconds``. Optional ones that were not
            written are missing.

    Examples:
        >>> print(Action("type", {"text": "a, b"}), Action("scroll", {"direction": "down"}))
        type("a, b") scroll(down)
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts: list[str] = []
        for name in _PARAMETERS.get(self.name, tuple(self.arguments)):
            if name in self.arguments:
                value = self.arguments[name]
                texts = [value] if name in ("key", "text") else value if name == "keys" else None
                parts += [str(value)] if texts is None else map(in_quotes, texts)
        return f"{self.name}({', '.join(parts)})"


def parse_actions(text: str, action_format: str = "tagged") -> list[Action]:
    r"""Parse the actions of a response.

    Actions stand between ``<|action_start|>`` and ``<|action_end|>`` (``"tagged"``) or between
    ``<action>`` and ``</action>`` (``"think"``): one or several, divided by spaces, line breaks or
    ``;``. A response may have several such parts. Text around them is ignored, and so are thoughts, even
    with actions in them: what stands before ``</think>`` or ``<|think_end|>``. These marks are text like
    any other where they stand in a part.

    The last end tag may be missing at the end of the response, as it is where the engine stops at this
    tag. The calls before it must be whole.

    ========================== ============================================================
    ``click(0.5, 0.5)``        left click at x, y
    ``left_double(0.5, 0.5)``  double click
    ``right_single(0.5, 0.5)`` right click
    ``drag(0.1, 0.2, 0.8, 1)`` drag from x, y to x2, y2
    ``hotkey("ctrl", "c")``    press keys together; also ``hotkey(ctrl, c)``, ``"ctrl+c"``
    ``key("enter")``           press a key; also without quotes
    ``type("a\n")``            type text; ``\n \r \t \" \' \\`` are escapes, lines may break
    ``scroll(0.5, 0.5, down)`` scroll; also ``scroll(down)`` and, by an amount,
                               ``scroll("down", 300)``
    ``wait(2)``                wait for seconds, or for one: ``wait()``; at most 60 in all
    ``call_user()``            ask for help
    ``done()``                 end the task
    ========================== ============================================================

    Coordinates are fractions of the screen; numbers above 1 are thousandths of it, at most 1000, each by
    itself: 1 is always the right or lower edge. Arguments may have keywords: ``click(x=0.5, y=0.5)``,
    ``type(text="a")``; a point or the box around it is ``start_box='(500, 500)'`` or ``point=``, the end
    of a drag ``end_box=`` or ``end_point=``.

    Args:
        text: the response.
        action_format: ``"tagged"`` or ``"think"``.

    Returns:
        The actions in order, at least one.

    Raises:
        ActionError: if there is no action, any part between the tags is not an action, or the actions
            wait for more than 60 seconds in all.
        TypeError: if ``text`` is no string.
        ValueError: if ``action_format`` is none of these.

    Examples:
        >>> said = "I type. <|action_start|>type('1, 2\\n') key(enter)<|action_end|>"
        >>> for action in parse_actions(said):
        ...     print(action)
        type("1, 2\n")
        key("enter")
        >>> parse_actions("<think>click it</think><action>click(500, 0.25)</action>", "think")
        [Action(name='click', arguments={'x': 0.5, 'y': 0.25})]
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be a string, got {type(text).__name__} ({text!r:.80}).")
    check_choice("action_format", action_format, ACTION_FORMATS)
    begin, end = ACTION_FORMATS[action_format]
    marks = re.compile("|".join(map(re.escape, (begin, *_THOUGHTS, *_THOUGHTS.values()))))
    found: list[Action] = []
    wrong: ActionError | None = None
    position = 0
    while mark := marks.search(text, position):
        position = mark.end()
        if mark[0] == begin:
            try:
                actions, position = _read_part(text, position, end)
                found += actions
            except ActionError as error:
                wrong = wrong or error
                position = _after_broken_part(text, position, begin, end)
            continue
        if mark[0] not in _THOUGHTS:
            found, wrong = [], None  # All so far was a thought that the prompt began.
            continue
        thought_end = text.find(_THOUGHTS[mark[0]], position)
        if thought_end < 0:
            never = f"the thought after {mark[0]} never ends with {_THOUGHTS[mark[0]]}."
            raise wrong or ActionError(never)
        position = thought_end + len(_THOUGHTS[mark[0]])
    if wrong is not None:
        raise wrong
    if not found:
        raise ActionError(f"there is no action between {begin} and {end}.")
    waits = (one.arguments.get("seconds", 1.0) for one in found if one.name == "wait")
    waited = math.fsum(waits)
    if waited > MAX_WAIT:
        raise ActionError(f"a response may wait for {MAX_WAIT:.0f} seconds in all, got {waited:g}.")
    return found


def describe_actions(action_format: str = "tagged") -> str:
    """Say to a model how actions are written, in the format and with every form.

    Examples:
        >>> print(describe_actions("think").splitlines()[0])
        Write one or several actions between <action> and </action>, after <think>...</think>:
    """
    begin, end = ACTION_FORMATS[action_format]
    after = ", after <think>...</think>:" if action_format == "think" else ":"
    forms = [f"{form}: {meaning}" for form, meaning in _FORMS.values()]
    return "\n".join(
        [
            f"Write one or several actions between {begin} and {end}{after}",
            *forms,
            "Coordinates are fractions of the screen's width and height, or thousandths up to 1000.",
        ]
    )


# ---- reading ------------------------------------------------------------------------------------


def _read_part(text: str, position: int, end: str) -> tuple[list[Action], int]:
    """The actions from a position to the ``end`` tag or the text's end, and the position after them."""
    actions: list[Action] = []
    while True:
        position = after(_BETWEEN_CALLS, text, position)
        if text.startswith(end, position):
            break
        if actions and position == len(text):  # The end tag was a stop string.
            return actions, position
        call = _CALL.match(text, position)
        if call is None:
            raise ActionError(f"expected an action or {end}, got {shown(text, position)}.")
        if call[1] not in _PARAMETERS:
            raise ActionError(
                f"there is no action {call[1][:40]!r}; the actions are {', '.join(_PARAMETERS)}."
            )
        given, position = read_arguments(text, call.end())
        actions.append(Action(call[1], _bound(call[1], given)))
    if not actions:
        raise ActionError(f"there is no action before {end}.")
    return actions, position + len(end)


def _after_broken_part(text: str, position: int, begin: str, end: str) -> int:
    """Where to go on after a part that begins at a position and cannot be read.

    What it quotes must not end a thought. So it goes to its last ``end`` tag before the next ``begin``
    tag, or to that one if it has none. But a ``begin`` tag alone, without a call, is only mentioned.
    """
    following = text.find(begin, position)
    following = len(text) if following < 0 else following
    last_end = text.rfind(end, position, following)
    if last_end >= 0:
        return last_end + len(end)
    is_part = _CALL.match(text, after(_BETWEEN_CALLS, text, position))
    return following if is_part else position


# ---- arguments ----------------------------------------------------------------------------------


def _bound(name: str, given: Sequence[tuple[str | None, Value]]) -> dict[str, Any]:
    """The arguments of an action by name, checked and converted."""
    values: dict[str, Any] = {}

    def give(parameter: str, value: Any) -> None:
        if parameter not in _PARAMETERS[name]:
            raise ActionError(f"{name} takes no {parameter[:40]!r}: write {_FORMS[name][0]}.")
        if parameter in values:
            raise ActionError(f"{name} got {parameter} twice: write {_FORMS[name][0]}.")
        values[parameter] = value

    free = iter(_positions(name, given))
    for keyword, value in given:
        if keyword is None:
            parameter = next(free, None)
            if parameter is None:
                raise ActionError(f"{name} got too many arguments: write {_FORMS[name][0]}.")
            if parameter == "keys":
                values.setdefault("keys", []).append(value)
            else:
                give(parameter, value)
        elif keyword in _POINTS and _POINTS[keyword][0] in _PARAMETERS[name]:
            for parameter, number in zip(_POINTS[keyword], _point(keyword, value), strict=True):
                give(parameter, number)
        elif name == "hotkey" and keyword in ("key", "keys"):
            give("keys", [value])
        else:
            give(_ALIASES.get(keyword, keyword), value)
    missing = set(_PARAMETERS[name]) - set(values) - _OPTIONAL.get(name, set())
    if ("x" in values) != ("y" in values):
        missing |= {"x", "y"} - set(values)
    if missing:
        lacking = " and ".join(p for p in _PARAMETERS[name] if p in missing)
        raise ActionError(f"{name} needs {lacking}: write {_FORMS[name][0]}.")
    return _converted(values)


def _positions(name: str, given: Sequence[tuple[str | None, Value]]) -> Sequence[str]:
    """The parameters that arguments without keywords are for, in order."""
    if name == "hotkey":
        return ["keys"] * len(given)
    # scroll(down) has its direction where scroll(0.5, 0.5, down) has its coordinates.
    first = next((value for keyword, value in given if keyword is None), None)
    if name == "scroll" and not (isinstance(first, Word) and first.text[0] in "-+.0123456789"):
        return _PARAMETERS[name][2:]
    return _PARAMETERS[name]


def _converted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check and convert the arguments, in the order of ``values``."""
    converted: dict[str, Any] = {}
    for name, value in values.items():
        if name in _COORDINATES:
            # Of a box, both sides; the point is between them.
            sides = value if isinstance(value, tuple) else (value,)
            fractions = [_fraction(name, side) for side in sides]
            converted[name] = sum(fractions) / len(fractions)
        else:
            converted[name] = _CONVERT[name](value)
    return converted


def _number(value: Any) -> float:
    """A number that was written without quotes; not a number for anything else."""
    if isinstance(value, Word) and _NUMBER.fullmatch(value.text):
        return float(value.text)
    return math.nan


def _fraction(name: str, value: Any) -> float:
    """A coordinate as a fraction of the screen."""
    number = _number(value)
    if not number <= 1000:
        raise ActionError(
            f"{name} must be a fraction from 0 to 1, or thousandths up to 1000, got {as_written(value)}."
        )
    return number / 1000 if number > 1 else number


def _point(keyword: str, value: Value) -> tuple[Any, Any]:
    """Both coordinates of a point; of a box, both are tuples of its sides."""
    if isinstance(value, str):
        words = _BOX_TAGS.sub(" ", value).replace(",", " ").split()
        numbers: list[Any] = [Word(word) for word in words]
    else:
        numbers = list(value) if isinstance(value, list) else []
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    if len(numbers) == 4:
        return tuple(numbers[::2]), tuple(numbers[1::2])
    raise ActionError(
        f"{keyword} must be a point, '(500, 500)', or a box, '(400, 400, 600, 600)', got "
        f"{as_written(value)}."
    )


def _keys(value: Sequence[Value]) -> list[str]:
    """The keys of ``hotkey``: one in each argument, or all in the only one, as in ``ctrl+c``."""
    given = [key for one in value for key in (one if isinstance(one, list) else [one])]
    if len(given) > 1:
        return [_key(key) for key in given]
    written = given[0].text if isinstance(given[0], Word) else given[0]
    keys: list[str] = []
    joined = True
    for part in re.findall(r"\+|[^+\s]+", written):
        # The second + of "ctrl++" is a key, and so is a + alone.
        if part == "+" and not joined:
            joined = True
            continue
        keys.append(_key(part))
        joined = False
    if joined:
        raise ActionError(
            f"hotkey needs the names of keys, joined by +, got {as_written(written)}: write "
            f"{_FORMS['hotkey'][0]}."
        )
    return keys


def _key(value: Any) -> str:
    written = value.text if isinstance(value, Word) else value
    if not isinstance(written, str) or not _KEY.fullmatch(written):
        raise ActionError(
            f'a key is one name without spaces, such as "enter", got {as_written(value)}; '
            f"hotkey presses several, as in {_FORMS['hotkey'][0]}."
        )
    return written


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ActionError(
            f"text must be in quotes, as in {_FORMS['type'][0]}, got {as_written(value)}."
        )
    if re.search("[\ud800-\udfff]", value):
        raise ActionError("text has half a character (a surrogate), which cannot be typed.")
    return value


def _direction(value: Any) -> str:
    written = value.text if isinstance(value, Word) else value
    if written not in _DIRECTIONS:
        raise ActionError(f"direction must be up or down, got {as_written(value)}.")
    return str(written)


def _amount(value: Any) -> int:
    number = _number(value)
    if not 1 <= number <= _MAX_AMOUNT or number != int(number):
        raise ActionError(
            f"amount must be a whole number from 1 to {_MAX_AMOUNT}, got {as_written(value)}."
        )
    return int(number)


def _seconds(value: Any) -> float:
    number = _number(value)
    if not number <= MAX_WAIT:
        raise ActionError(f"seconds must be from 0 to {MAX_WAIT:.0f}, got {as_written(value)}.")
    return number


_CONVERT: Mapping[str, Callable[[Any], Any]] = {
    "keys": _keys,
    "key": _key,
    "text": _text,
    "direction": _direction,
    "amount": _amount,
    "seconds": _seconds,
}
