"""Loops over a loader, and environments that remember what they were told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchrl_mt.bridges.cua_bench import MultiTurnDataLoader
from torchrl_mt.envs import TextEnv, TextStep


class Scripted(TextEnv):
    """Rewards of its turns are those of its item; remembers all responses in ``heard``."""

    inline = True
    heard: list[str]

    def __init__(self, heard: list[str] | None = None, rewards: Sequence[float] = (0.0, 0.0, 1.0)):
        self.heard = [] if heard is None else heard
        self.rewards = rewards

    def __deepcopy__(self, memo):
        return type(self)(self.heard, self.rewards)

    def reset(self, data=None):
        self.rewards = (data or {}).get("rewards", self.rewards)
        self.turn = 0
        return [{"role": "user", "content": "1"}]

    def step(self, response):
        self.heard.append(response)
        self.turn += 1
        done = self.turn == len(self.rewards)
        info = {"turn": self.turn}
        return TextStep(
            [{"role": "user", "content": "2"}], self.rewards[self.turn - 1], done, info=info
        )


class Plain:
    """An environment of cua-bench's form; its config has the rewards of each of its episodes."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.episodes = 0
        self.heard: list[str] = config.setdefault("heard", [])

    def reset(self):
        scripts = self.config.get("scripts", [[0.0, 0.0, 1.0]])
        self.rewards = scripts[self.episodes % len(scripts)]
        self.episodes += 1
        self.turn, self.obs = 0, "1"
        return {"obs": self.obs, "done": False, "is_init": True}, self.meta()

    def step(self, action):
        self.heard.append(action)
        self.turn += 1
        before, self.obs = self.obs, f"{self.obs} {self.turn % 9}"
        state = {
            "prev_obs": before,
            "action": action,
            "obs": self.obs,
            "reward": self.rewards[self.turn - 1],
            "done": self.turn == len(self.rewards),
            "is_init": False,
        }
        return state, self.meta()

    def meta(self):
        return {"uid": "the same", "task": self.config.get("task", "t")}

    def close(self):
        self.config["closed"] = True


Rule = Callable[[int], list[int]]


def answers(batch: dict[str, Any], rule: Rule, *, width: int | None = None) -> dict[str, Any]:
    """Answers to a batch: ``rule(row)`` gives the tokens of each row."""
    rows = [rule(row) for row in range(len(batch["worker_id"]))]
    width = width or max(map(len, rows))
    responses = torch.full((len(rows), width), 3)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for row, ids in enumerate(rows):
        responses[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids)] = 1
    return {
        "prompts": batch["input_ids"],
        "responses": responses,
        "attention_mask": torch.cat([batch["attention_mask"], mask], dim=1),
        "worker_id": batch["worker_id"],
        "meta_info": batch["meta_info"],
    }


def play(loader: MultiTurnDataLoader, rule: Rule, until: Callable[[], object]) -> int:
    """Answer batches until a condition holds or the data ends; return the number of answers."""
    given = 0
    for batch in loader:
        loader.async_step(answers(batch, rule))
        given += len(batch["worker_id"])
        if until():
            break
    return given
