"""A server of the completions API, which samples from a known distribution."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.faulty_server import FaultyServer

VOCABULARY = 26
STOP = 1


def weights_after(token: int) -> list[int]:
    """How likely each token is to follow another: what the server samples from."""
    return [1 + (3 * following + token) % 7 for following in range(VOCABULARY)]


def sampled(
    prompt: list[int],
    max_tokens: int,
    stop: Sequence[str] = (),
    decode: Callable[[list[int]], str] | None = None,
) -> tuple[list[int], list[float], str]:
    """An answer, the same for the same prompt; with stop strings, its beginning."""
    rng = random.Random(str(prompt))
    last, tokens, log_probs = prompt[-1], [], []
    while len(tokens) < max_tokens:
        weights = weights_after(last)
        (last,) = rng.choices(range(VOCABULARY), weights)
        tokens.append(last)
        log_probs.append(math.log(weights[last] / sum(weights)))
        if last == STOP:
            return tokens, log_probs, "stop"
        if decode is not None and any(string in decode(tokens) for string in stop):
            return tokens, log_probs, "stop"
    return tokens, log_probs, "length"


def completion(
    body: dict[str, Any], decode: Callable[[list[int]], str] | None = None
) -> dict[str, Any]:
    """What vLLM would send."""
    stop = body.get("stop") or []
    tokens, log_probs, reason = sampled(body["prompt"], body["max_tokens"], stop, decode)
    found = [string for string in stop if decode is not None and string in decode(tokens)]
    return {
        "id": "cmpl-1",
        "model": body["model"],
        "choices": [
            {
                "index": 0,
                "text": "not to be used",
                "finish_reason": reason,
                "stop_reason": found[0] if found and tokens[-1] != STOP else None,
                "token_ids": tokens,
                "logprobs": {
                    "tokens": [f"token_id:{token}" for token in tokens],
                    "token_logprobs": log_probs,
                    "top_logprobs": None,
                },
            }
        ],
    }


class CompletionsServer(FaultyServer):
    """Answers as vLLM does; ``change`` has the last word."""

    change: Callable[[dict[str, Any]], Any] = staticmethod(lambda answer: answer)
    decode: Callable[[list[int]], str] | None = None
    """Decodes tokens, for stop strings."""
    models: Any = None
    """The answer to ``GET /v1/models``; without one, there is no such page."""
    asked_for_models = 0

    def look_up(self, path: str) -> tuple[int, Any]:
        self.asked_for_models += path == "/v1/models"
        return (
            (404, {"error": {"message": f"no {path}"}})
            if self.models is None
            else (200, self.models)
        )

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path != "/v1/completions":
            return 404, {"error": {"message": f"no {path}"}}
        return 200, self.change(completion(body, self.decode))
