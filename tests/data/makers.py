"""Makers of episodes, and what to compare them by; tests get this module as ``make``."""

import torch
from tensordict import NonTensorStack, TensorDict, is_tensorclass, lazy_stack
from tensordict.utils import is_non_tensor


def ends(*lengths):
    """Flags ``[N, 1]``, true at the last step of each of these episodes."""
    flags = torch.zeros(sum(lengths), 1, dtype=torch.bool)
    flags[torch.tensor(lengths).cumsum(0) - 1] = True
    return flags


def whole(entries, *lengths):
    """Whole episodes of these lengths, with these entries."""
    return TensorDict(entries, [sum(lengths)]).set(("next", "done"), ends(*lengths))


def vectors(lengths, seed=0, first_id=0):
    """Whole episodes of vectors, one after the other: observations shared with the next step."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for i, length in enumerate(lengths, first_id):
        seen = torch.randn(length + 1, 3, generator=generator)
        ended = ends(length)
        parts.append(
            TensorDict(
                {
                    "observation": seen[:-1],
                    "action": torch.randint(100, (length,), generator=generator, dtype=torch.int32),
                    "episode": torch.full((length,), i),
                    "step": torch.arange(length),
                    "is_init": torch.arange(length)[:, None] == 0,
                    "done": torch.zeros_like(ended),
                    "next": {
                        "observation": seen[1:],
                        "reward": torch.randn(length, 1, generator=generator),
                        "done": ended,
                        "terminated": ended if i % 2 else torch.zeros_like(ended),
                        "truncated": torch.zeros_like(ended) if i % 2 else ended,
                    },
                },
                [length],
            )
        )
    return torch.cat(parts)


def turns(lengths, seed=0, first_id=0):
    """Whole episodes of a language model's turns, one after the other: a lazy stack."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high, *shape):
        return torch.randint(high, shape, generator=generator)

    steps = []
    for i, length in enumerate(lengths, first_id):
        for t in range(length):
            n = int(integers(5, 1))
            steps.append(
                TensorDict(
                    {
                        "tokens": {
                            "prompt": integers(1000, int(integers(9, 1))),
                            "response": integers(1000, n),
                        },
                        "log_probs": {"response": -torch.rand(n, generator=generator)},
                        "versions": {"response": integers(3, n)},
                        "image": torch.rand(int(integers(3, 1)), 2, generator=generator),
                        "group": torch.tensor(i // 2),
                        "collector": {"traj_ids": torch.tensor(i)},
                        "text": f"turn {i}.{t}",
                        "stop_reason": "end" if t + 1 == length else None,
                        "next": {
                            "reward": torch.rand(1, generator=generator),
                            "done": torch.tensor([t + 1 == length]),
                        },
                    },
                    [],
                )
            )
    return lazy_stack(steps)


def steps(data):
    """Each step as a flat dict of bits and objects."""
    return [_leaves(data[i]) for i in range(data.batch_size[0])]


def _leaves(node, path=()):
    out = {}
    for name, value in node.items():
        where = (*path, name)
        if isinstance(value, torch.Tensor):
            bits = value.contiguous().reshape(-1).view(torch.uint8).tolist()
            out[where] = (value.dtype, tuple(value.shape), bits)
        elif is_non_tensor(value):
            out[where] = value.tolist() if isinstance(value, NonTensorStack) else value.data
        else:
            out |= {where: (type(value), value.batch_size)} if is_tensorclass(value) else {}
            out |= _leaves(value, where)
    return out


# What a sampler of slices marks anew, and a TensorDictReplayBuffer adds.
ENTRIES = ("is_init", "index", "staleness", "priority_weight")
NESTED = {"next": ("done", "terminated", "truncated"), "index": ("index", "buffer_ids")}
MARKS = {(key,) for key in ENTRIES} | {(of, key) for of, keys in NESTED.items() for key in keys}


def unmarked(steps):
    """The steps without what sampling marks or adds."""
    return [{key: leaf for key, leaf in step.items() if key not in MARKS} for step in steps]


def split(data):
    """The episodes of a batch of whole ones."""
    ends = data["next", "done"].reshape(-1).nonzero().squeeze(1).tolist()
    starts = [0, *(end + 1 for end in ends[:-1])]
    return [data[start : end + 1] for start, end in zip(starts, ends, strict=True)]
