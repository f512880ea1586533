"""A server as cua-bench's: a reset ends other episodes, ids are used again, done evaluates."""

from __future__ import annotations

import base64
import threading
from io import BytesIO

from PIL import Image

from tests.faulty_server import FaultyServer

TAGS = {"tagged": ("<|action_start|>", "<|action_end|>"), "think": ("<action>", "</action>")}


def acting(*actions, action_format="tagged"):
    """A response with actions."""
    begin, end = TAGS[action_format]
    return f"I act. {begin}{' '.join(actions)}{end}"


def png(width, height, colour=0):
    """A grey image in base64."""
    file = BytesIO()
    Image.new("L", (width, height), colour).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


class FakeWorker(FaultyServer):
    """Remembers what it was asked; ``faults`` of :class:`FaultyServer` come first.

    Args:
        observe: called with the number of actions of the episode so far; returns the observation's part
            of an answer. A text by default.
        evaluate: called with the actions of the episode; returns the reward.
    """

    def __init__(self, observe=None, evaluate=None):
        super().__init__()
        self.observe = observe or (lambda steps: {"text": f"screen{steps}"})
        self.evaluate = evaluate or (lambda actions: float(len(actions)))
        self.asked = []
        """Paths and bodies of the requests that were answered without a fault."""
        self.active = {}
        """Actions of the live episodes, by id."""
        self.ended_by_reset = 0
        self.played = []
        """Tasks and actions of the episodes that were evaluated."""
        self.tasks = {}
        self.state = threading.Lock()

    def answer(self, path, body):
        with self.state:
            self.asked.append((path, body))
            return getattr(self, f"on_{path[1:]}")(**body)

    def on_reset(self, env_path, task_index, split, timeout):
        assert isinstance(timeout, int)
        self.ended_by_reset += len(self.active)
        self.active.clear()
        if env_path == "broken":
            return 500, {"detail": "no such environment"}
        self.active[0] = []
        self.tasks[0] = (env_path, task_index, split)
        instruction = f"task{task_index}"
        return 200, {"instruction": instruction, "env_id": 0, **self.observe(0)}

    def on_step(self, action, env_id):
        if env_id not in self.active:
            return 404, {"detail": f"Environment {env_id} not found"}
        actions = self.active[env_id]
        actions.append(action)
        done = action["type"] == "DoneAction"
        reward = 0.0
        if done:
            reward = self.evaluate(actions)
            self.played.append((self.tasks[env_id], actions))
            del self.active[env_id]
        return 200, {"reward": reward, "done": done, **self.observe(len(actions))}

    def on_shutdown(self, env_id):
        self.active = (
            {} if env_id is None else {k: v for k, v in self.active.items() if k != env_id}
        )
        return 200, {"status": "ok"}
