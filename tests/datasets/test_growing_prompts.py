"""Prompts are written as what each turn adds, and read as they were, in every lossless format."""

from __future__ import annotations

import json
import random
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch

from tests.tiers import few_or_many
from torchrl_mt.data import EpisodeStorage
from torchrl_mt.datasets import ClipDataset, EpisodeDataset, load_episodes, save_episodes

from .episodes import DTYPES, Rows, Steps, assert_same, pack, random_bits
from .every_format import LOSSLESS, new_path

every_format = pytest.mark.parametrize("format", LOSSLESS)
INTEGERS = [d for d in DTYPES if not (d.is_floating_point or d.is_complex or d == torch.bool)]


def forked_episode(rng, dtype=torch.int64, *, parents=False, turns=None):
    """Turns that go on, fork anywhere, are asked twice, rewrite the history, or begin anew."""
    prompts, responses, parent = [], [], []
    for t in range(turns or rng.randrange(1, 9)):
        base = rng.randrange(-1, t)
        history = [] if base < 0 else prompts[base] + responses[base]
        how = rng.choice(["on", "on", "cut", "twice", "rewritten"])
        if how == "cut":
            history = history[: rng.randrange(len(history) + 1)]
        elif how == "twice" and base >= 0:
            history = prompts[base]
        elif how == "rewritten" and history:
            history = [*history]
            history[rng.randrange(len(history))] = rng.randrange(4)
        new = [] if how == "twice" else [rng.randrange(4) for _ in range(rng.randrange(4))]
        prompts.append(history + new)
        responses.append([rng.randrange(4) for _ in range(rng.randrange(3))])
        parent.append(rng.choice([base, -1]))
    columns = {
        ("tokens", "prompt"): Rows([torch.tensor(x, dtype=dtype) for x in prompts]),
        ("tokens", "response"): Rows([torch.tensor(x, dtype=dtype) for x in responses]),
        ("log_probs", "response"): Rows(
            [random_bits(rng, (len(x),), torch.float32) for x in responses]
        ),
        ("next", "reward"): random_bits(rng, (len(prompts), 1), torch.float32),
    }
    if parents:
        columns["turn", "parent"] = torch.tensor(parent)
    return pack(Steps(len(prompts), columns), unread=True)


@every_format
@few_or_many(8, 25)
def test_forked_episodes_are_read_as_they_were(format, examples, tmp_path):
    for seed in range(examples):
        rng = random.Random(seed)
        dtype, parents = rng.choice([torch.int64, *INTEGERS]), rng.random() < 0.5
        episodes = [forked_episode(rng, dtype, parents=parents) for _ in range(rng.randrange(1, 5))]
        path = new_path(tmp_path, format, seed)
        save_episodes(episodes[:1], path, format=format)
        save_episodes(episodes[1:], path, mode="append")
        dataset = EpisodeDataset(path)
        assert ("tokens", "prompt") in dataset.keys
        assert len(dataset.keys) == 4 + parents
        alone = EpisodeDataset(path, [("tokens", "prompt")])
        storage = EpisodeStorage(100)
        load_episodes(path, storage)
        for i, episode in enumerate(episodes):
            assert_same(dataset.episode(i), episode)
            assert_same(alone.episode(i), episode.select(("tokens", "prompt")))
            assert_same(storage.episode(i), episode)
        clips, length = ClipDataset(path, 2), [len(episode) for episode in episodes]
        places = [(e, t) for e, n in enumerate(length) for t in range(n - 1)]
        order = rng.sample(range(len(places)), len(places))
        read = clips.__getitems__(order) if order else []
        for place, clip in zip(order, read, strict=True):
            episode, step = places[place]
            expected = episodes[episode][step : step + 2]
            assert_same(clip.select(*dataset.keys), expected)


def conversation(turns, words=30):
    """A conversation that only grows."""
    rng, history, prompts, responses = np.random.default_rng(turns), np.empty(0, int), [], []
    for _ in range(turns):
        prompts.append(np.concatenate([history, rng.integers(50_000, size=words)]))
        responses.append(rng.integers(50_000, size=words))
        history = np.concatenate([prompts[-1], responses[-1]])
    columns = {
        ("tokens", name): Rows([*map(torch.from_numpy, items)])
        for name, items in (("prompt", prompts), ("response", responses))
    }
    return pack(Steps(turns, columns), unread=True)


def size_of(path):
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


@every_format
def test_files_grow_with_the_turns_and_not_with_their_square(format, tmp_path):
    short, long = (new_path(tmp_path, format, name) for name in ("short", "long"))
    save_episodes([conversation(64)] * 4, short, format=format)
    save_episodes([conversation(256)] * 4, long, format=format)
    assert size_of(long) < 5 * size_of(short)


def test_a_turn_that_refers_to_nothing_is_named(tmp_path):
    """It is read by the same code in every format; the lines of this one need no checksum."""
    path, changed = tmp_path / "written.jsonl", tmp_path / "changed.jsonl"
    save_episodes([conversation(3)], path)
    for name, value in [("back", 4), ("back", -1), ("kept", 10**6), ("kept", -1)]:
        line = json.loads(path.read_text())
        del line["crc32"]
        line["steps"]["tokens"]["prompt"][name][1] = value
        changed.write_text(json.dumps(line) + "\n")
        with pytest.raises(ValueError, match=r"episode 0 .*turn 1"):
            EpisodeDataset(changed).episode(0)


def test_other_programs_expand_the_prompts_as_the_page_says(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "datasets.rst").read_text(encoding="utf-8")
    code = page[page.index("    def whole_prompts(") :].split("\n\n")[0]
    names: dict = {}
    exec(dedent(code), names)  # The page's own words.
    path = tmp_path / "talk.jsonl"
    episode = forked_episode(random.Random(2), turns=9)
    save_episodes([episode], path)
    tokens = json.loads(path.read_text())["steps"]["tokens"]
    whole = names["whole_prompts"](**tokens["prompt"], responses=tokens["response"])
    assert whole == [x.tolist() for x in episode.get(("tokens", "prompt"), as_list=True)]
