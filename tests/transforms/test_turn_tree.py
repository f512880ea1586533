"""Parents are those of the definition, and prompts that share memory are neither copied nor compared."""

from __future__ import annotations

import tracemalloc
from functools import partial
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.buffers import buffer_of
from tests.data.conversations import turns_of
from torchrl_mt.transforms import MergeTurns

from .test_merge_turns import batches, reference_parents, same, to_ted

ANSWER, NEWS = 60, 4


class Allocated(TorchDispatchMode):
    """Counts the bytes of every tensor that is made."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {place(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        self.nbytes += sum(
            x.untyped_storage().nbytes()
            for x in tree_leaves(out)
            if isinstance(x, torch.Tensor) and place(x) not in given
        )
        return out


def place(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def cost(function) -> int:
    """All bytes of tensors that a call makes, and the most that it holds of everything else."""
    with Allocated() as made:
        tracemalloc.start()
        function()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return made.nbytes + peak


def dialogue(turns: int, shared: bool = True) -> LazyStackedTensorDict:
    """One long conversation, as collectors and stores give it: prompts are views of one line."""
    step = ANSWER + NEWS
    line = torch.arange(8 + turns * step) % 97
    prompts = [line[: 8 + k * step] for k in range(turns)]
    return turns_of(
        prompts if shared else [prompt.clone() for prompt in prompts],
        [line[len(prompt) : len(prompt) + ANSWER] for prompt in prompts],
        {("next", "reward"): lambda _: torch.ones(1)},
        log_probs=lambda _: {"response": torch.zeros(ANSWER)},
        versions=lambda _: {"response": torch.zeros(ANSWER, dtype=torch.int64)},
        collector=lambda _: {"traj_ids": torch.tensor(0)},
    )


def test_the_cost_of_a_dialogue_is_linear_in_its_length():
    dialogues = [dialogue(turns) for turns in (64, 128, 256, 512)]
    costs = [cost(partial(MergeTurns(), batch)) for batch in dialogues]
    for before, after in pairwise(costs):
        assert after <= 2.2 * before


def test_so_it_is_when_read_from_a_buffer():
    def read(turns):
        buffer = buffer_of(turns, transform=MergeTurns())
        buffer.extend(dialogue(turns))
        rows = []
        spent = cost(lambda: rows.append(buffer[:]))
        assert rows[0]["masks", "all_assistant_mask"].sum() == turns * ANSWER
        return spent

    costs = [read(turns) for turns in (64, 128, 256)]
    for before, after in pairwise(costs):
        assert after <= 2.2 * before


def test_long_prompts_of_their_own_are_compared_where_they_lie():
    batch = dialogue(256, shared=False)
    given = sum(prompt.nbytes for prompt in batch.get(("tokens", "prompt"), as_list=True))
    assert cost(lambda: MergeTurns()(batch)) < given / 5


def in_one_place(prompts: list[list[int]], stride: int) -> list[torch.Tensor]:
    """Prompts as views of as few tensors as possible."""
    lines: dict[tuple[int, ...], torch.Tensor] = {}
    for prompt in sorted(map(tuple, prompts), key=len, reverse=True):
        if not any(line[: len(prompt)] == prompt for line in lines):
            memory = torch.full((len(prompt), stride), -1)
            memory[:, 0] = torch.tensor(prompt)
            lines[prompt] = memory[:, 0]
    return [
        next(t[: len(p)] for line, t in lines.items() if line[: len(p)] == tuple(p))
        for p in prompts
    ]


def first_turn(episode):
    """Parents that may fit the tokens, and are often not the longest turn that does."""
    return [parent if parent < 0 else 0 for parent in reference_parents(episode)]


@given(
    episodes=batches,
    stride=st.sampled_from([1, 2]),
    mixed=st.booleans(),
    parents=st.sampled_from([None, reference_parents, first_turn]),
)
def test_rows_of_views_and_of_any_layout_are_those_of_copies(episodes, stride, mixed, parents):
    views, dtype = to_ted(episodes, parents=parents), torch.int32 if mixed else torch.int64
    prompts = in_one_place([turn.prompt for episode in episodes for turn in episode], stride)
    for turn, prompt in zip(views.unbind(0), prompts, strict=True):
        turn["tokens", "prompt"] = prompt
        turn["tokens", "response"] = turn["tokens", "response"].to(dtype)
    assert same(MergeTurns()(views), MergeTurns()(to_ted(episodes)))


def test_a_place_alone_does_not_make_two_vectors_the_same():
    """Vectors that begin in one place may go on differently."""
    memory = torch.arange(40)

    def rows(prompts, responses):
        parent = {"parent": torch.tensor(-1)}, {"parent": torch.tensor(0)}
        responses = [torch.tensor([token]) for token in responses]
        collector = {"traj_ids": torch.tensor(0)}
        turns = turns_of(prompts, responses, turn=parent.__getitem__, collector=lambda _: collector)
        return len(MergeTurns()(turns))

    assert rows([memory[:5], memory[:20:2]], [5, 0]) == 2
    assert rows([memory[:5], memory[:9]], [5, 0]) == 1
    # Another answer to the first prompt than the line goes on with.
    assert rows([memory[:5], memory[:9]], [6, 0]) == 2
