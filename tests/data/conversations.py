"""Conversations drawn by hypothesis: prompts and responses of turns."""

import torch
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

PROMPT, RESPONSE = ("tokens", "prompt"), ("tokens", "response")

tokens = st.lists(st.integers(0, 2), max_size=5)
turns = st.tuples(tokens, tokens, st.sampled_from(["extend", "cut", "alone"]), st.integers(0, 12))
conversations = st.lists(turns, min_size=1, max_size=6)


def play(conversation):
    """Prompts and responses: each prompt extends what came before, a part of it, or nothing."""
    history, prompts, responses = [], [], []
    for added, response, how, cut in conversation:
        base = {"extend": history, "cut": history[:cut], "alone": []}[how]
        prompts.append(torch.tensor(base + added, dtype=torch.int64))
        responses.append(torch.tensor(response, dtype=torch.int64))
        history = base + added + response
    return prompts, responses


def turns_of(prompts, responses, nested=(), **entries):
    """A whole episode; each of the entries is a function of a turn's number."""
    steps, entries = [], {**dict(nested), **entries}
    for t, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        step = {"tokens": {"prompt": prompt, "response": response}}
        step |= {"next": {"done": torch.tensor([t == len(prompts) - 1])}}
        steps.append(TensorDict(step | {key: entry(t) for key, entry in entries.items()}))
    return lazy_stack(steps)


def listed(data, key):
    return [step.tolist() for step in data.get(key, as_list=True)]
