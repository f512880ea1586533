"""A reward server whose rewards anybody can check."""

from __future__ import annotations

import time
from typing import Any

from tests.faulty_server import FaultyServer


class RewardServer(FaultyServer):
    """Scores a query with its number of words, ``delay`` seconds later."""

    delay = 0.0

    @property
    def url(self) -> str:
        return f"{super().url}/score"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path != "/score":
            return 404, {"error": {"message": f"no {path}"}}
        time.sleep(self.delay)
        return 200, {"rewards": [len(query.split()) for query in body["queries"]]}
