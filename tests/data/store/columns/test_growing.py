import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.conversations import PROMPT, RESPONSE, conversations, listed, play, turns_of
from tests.tiers import examples
from torchrl_mt.data import EpisodeStorage


def episode(prompts, responses, identity=0, parents=None):
    entries = {"episode": lambda t: torch.tensor(identity)}
    if parents is not None:
        entries["turn"] = lambda t: {"parent": torch.tensor(parents[t])}
    return turns_of(prompts, responses, **entries)


def plain(tensors):
    return [tensor.tolist() for tensor in tensors]


told = st.one_of(st.none(), st.lists(st.integers(-2, 7), min_size=18, max_size=18))
"""Parents of turns, wrong for the most part."""


@examples()
@given(conversation=conversations, parents=told)
def test_no_token_is_stored_that_a_prompt_shares(conversation, parents):
    data = play(conversation)
    storage = EpisodeStorage(9)
    storage.append(episode(*data, parents=parents))
    if PROMPT not in storage.growing_keys or RESPONSE not in storage.ragged_keys:
        return
    prompts, responses = map(plain, data)
    tokens = sum(map(len, responses))
    for t, prompt in enumerate(prompts):
        shared = [0]
        for base in {t - 1, parents[t] if parents else t - 1} & set(range(t)):
            before = prompts[base] + responses[base]
            pairs = [a == b for a, b in zip(prompt, before, strict=False)]
            shared.append([*pairs, False].index(False))
        tokens += len(prompt) - max(shared)
    assert storage.num_tokens == tokens


@examples(15)
@given(
    episodes=st.lists(conversations, min_size=1, max_size=9),
    max_steps=st.integers(6, 14),
    picks=st.lists(st.integers(0, 999), min_size=1, max_size=9),
    parents=told,
)
def test_stored_prompts_are_those_written(episodes, max_steps, picks, parents):
    storage, model = EpisodeStorage(max_steps), []
    for i, conversation in enumerate(episodes):
        prompts, responses = play(conversation)
        storage.append(episode(prompts, responses, i, parents))
        model.append((plain(prompts), plain(responses)))
        while sum(len(p) for p, _ in model) > max_steps:
            del model[0]
    steps = [step for prompts, _ in model for step in prompts]
    assert listed(storage[:], PROMPT) == steps
    index = torch.tensor([pick % len(steps) for pick in picks])
    assert listed(storage[index], PROMPT) == [steps[i] for i in index.tolist()]
    for i, (prompts, responses) in enumerate(model):
        stored = storage.episode(i)
        assert listed(stored, PROMPT) == prompts
        assert listed(stored, RESPONSE) == responses
    again = pickle.loads(pickle.dumps(storage))
    assert listed(again[:], PROMPT) == steps


def test_prompts_of_one_length_come_first():
    storage = EpisodeStorage(20)
    storage.append(episode([torch.tensor([1, 2])], [torch.tensor([3])], 0))
    assert storage.growing_keys == []
    prompts, responses = play([([1], [2, 2], "extend", 0), ([3], [4], "extend", 0)])
    storage.append(episode(prompts, responses, 1))
    assert storage.growing_keys == [PROMPT]
    assert listed(storage[:], PROMPT) == [[1, 2], [1], [1, 2, 2, 3]]
    assert listed(storage[:], RESPONSE) == [[3], [2, 2], [4]]


def test_responses_of_one_length():
    storage = EpisodeStorage(20)
    prompts, responses = play([([1], [2], "extend", 0), ([3], [4], "extend", 0)])
    storage.append(episode(prompts, responses))
    assert storage.growing_keys == [PROMPT]
    assert storage.ragged_keys == [PROMPT]
    assert listed(storage[:], PROMPT) == [[1], [1, 2, 3]]
    prompts, responses = play([([1], [2, 5], "extend", 0), ([3], [4], "extend", 0)])
    storage.append(episode(prompts, responses))
    assert listed(storage[:], PROMPT) == [[1], [1, 2, 3], [1], [1, 2, 5, 3]]


@pytest.mark.parametrize("change", [torch.Tensor.float, torch.Tensor.int])
def test_prompts_of_another_dtype_than_responses_are_stored_whole(change):
    prompts, responses = play([([1], [2], "extend", 0), ([3], [4, 4], "extend", 0)])
    storage = EpisodeStorage(9)
    storage.append(episode([change(prompt) for prompt in prompts], responses))
    assert storage.growing_keys == []
    assert listed(storage[:], PROMPT) == [[1], [1, 2, 3]]


def stored_bytes(turns, episodes=6):
    """Bytes that conversations of 200 new tokens a turn take, and those of their own tokens."""
    storage, own = EpisodeStorage(turns * episodes), 0
    generator = torch.Generator().manual_seed(turns)
    for _ in range(episodes):
        sizes = torch.randint(50, 150, (turns,), generator=generator).tolist()
        conversation = [([t] * (200 - n), [-t] * n, "extend", 0) for t, n in enumerate(sizes)]
        data = episode(*play(conversation))
        for step, n in zip(data.unbind(0), sizes, strict=True):
            step["log_probs", "response"] = torch.rand(n)
            step["versions", "response"] = torch.zeros(n, dtype=torch.int64)
            own += 8 * 200 + 4 * n + 8 * n
        storage.append(data)
    return storage.nbytes, own


def test_conversations_take_memory_in_proportion_to_their_length():
    held, own = stored_bytes(64)
    assert held <= 1.15 * own
    assert held <= 4.2 * stored_bytes(16)[0]


def test_so_do_conversations_that_take_turns_in_one_episode():
    def held(agents, turns=48):
        line = [torch.arange(a, 200 * turns, dtype=torch.int64) for a in range(agents)]
        ends = [100 + 200 * (t // agents) for t in range(turns)]
        prompts = [line[t % agents][:end] for t, end in enumerate(ends)]
        responses = [line[t % agents][end : end + 50] for t, end in enumerate(ends)]
        parents = [t - agents if t >= agents else -1 for t in range(turns)]
        storage = EpisodeStorage(turns)
        storage.append(episode(prompts, responses, parents=parents))
        assert listed(storage[:], PROMPT) == plain(prompts)
        assert listed(storage[torch.tensor([40])], PROMPT) == plain([prompts[40]])
        return storage.nbytes

    assert held(4) <= 1.1 * held(1)
