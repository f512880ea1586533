"""One pass over the text of a reply, in time linear in its length whatever the model has written."""

from __future__ import annotations

import json
import re
from typing import Any

from torchrl_mt.chat.replies.reply import MalformedError

__all__ = ["Scanner"]

_SPACES = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


class Scanner:
    """Reads a text from its beginning to its end.

    Every method moves on over what it looks at, or says that there is no more to come. So no character
    is looked at twice, as it would be by patterns with several open ends.

    Args:
        text: the text.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        """Where to read on."""

    def is_done(self) -> bool:
        """Whether only white space is left, which is read."""
        spaces = _SPACES.match(self.text, self.at)
        self.at = self.at if spaces is None else spaces.end()
        return self.at == len(self.text)

    def takes(self, mark: str) -> bool:
        """Whether a mark comes next, after white space; it is read then."""
        self.is_done()
        found = self.text.startswith(mark, self.at)
        self.at += len(mark) * found
        return found

    def expect(self, mark: str) -> None:
        """Read a mark, and white space before it.

        Raises:
            MalformedError: if anything else comes next.
        """
        if not self.takes(mark):
            raise MalformedError(f"{mark} is missing: {self.text[self.at :][:80]!r}")

    def before(self, mark: str) -> str | None:
        """Read the text before a mark, and the mark; ``None`` if there is none, and nothing is read."""
        end = self.text.find(mark, self.at)
        if end < 0:
            return None
        start, self.at = self.at, end + len(mark)
        return self.text[start:end]

    def until(self, mark: str) -> str:
        """Read the text before a mark, and the mark.

        Raises:
            MalformedError: if there is no such mark.
        """
        found = self.before(mark)
        if found is None:
            raise MalformedError(f"{mark} is missing")
        return found

    def rest(self) -> str:
        """Read all that is left."""
        start, self.at = self.at, len(self.text)
        return self.text[start:]

    def json(self) -> Any:
        """Read a JSON value, after white space.

        Raises:
            ValueError: if there is none.
        """
        self.is_done()
        value, self.at = _DECODER.raw_decode(self.text, self.at)
        return value
