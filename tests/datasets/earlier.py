"""Data sets written when prompts were whole and a schema said which entries are stacked.

``python -m tests.datasets.earlier FILE`` writes the same contents to a zip file with the code as it is.
"""

import random
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from torchrl_mt.datasets import save_episodes

from .episodes import Objects, Rows, Steps, pack
from .every_format import LOSSLESS, new_path

DATASETS = Path(__file__).with_name("earlier_datasets.zip")


def episode(number, turns):
    """Turns with prompts that grow and fork, and with entries of one shape in a lazy stack."""
    rng = random.Random(number)
    prompts, responses, history = [], [], [1]
    for t in range(turns):
        history = [*(history[:2] if t % 4 == 3 else history), *range(rng.randrange(4))]
        prompts.append(torch.tensor(history))
        responses.append(torch.arange(rng.randrange(3)))
        history = history + responses[-1].tolist()
    ends = torch.arange(turns).unsqueeze(-1) == turns - 1
    columns = {
        ("tokens", "prompt"): Rows(prompts),
        ("tokens", "response"): Rows(responses),
        ("tokens", "of one size"): Rows([torch.full((number + 1,), t) for t in range(turns)]),
        ("observation",): torch.arange(turns).unsqueeze(-1) + 0.5,
        ("text",): Objects([f"turn {t}" for t in range(turns)]),
        ("next", "observation"): torch.arange(turns).unsqueeze(-1) + 1.5,
        ("next", "done"): ends,
    }
    return pack(Steps(turns, columns), unread=True)


def episodes():
    return [episode(number, turns) for number, turns in enumerate([3, 6, 1])]


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        for format in LOSSLESS:
            save_episodes(episodes(), new_path(Path(folder), format, "earlier"), format=format)
        shutil.make_archive(sys.argv[1].removesuffix(".zip"), "zip", folder)
