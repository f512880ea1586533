"""TorchRL's ``LLMCollector`` fills the buffer with whole dialogs, and nothing in them is changed.

Its steps are lazy stacks that hold ``History`` objects, ragged tokens and log-probabilities.
"""

import functools
import re

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.data import (
    LazyStackStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    Unbounded,
)
from torchrl.data.llm import History
from torchrl.data.llm.history import add_chat_template
from torchrl.envs import StepCounter, TrajCounter, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import MCAdvantage

from tests.buffers import buffer_of
from tests.data import makers
from tests.tiers import slow
from torchrl_mt.data import EpisodeSampler, EpisodeWriter
from torchrl_mt.testing import tiny_chat_model
from torchrl_mt.transforms import MergeTurns

WORDS = ["guess", "to", "higher", "lower", "correct", *map(str, range(16))]
# TorchRL takes templates that mark what the assistant said, and text that can be parsed again.
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {% generation %}{{ message['content'] }}"
    "<end>{% endgeneration %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ANSWER = " <end> <user> higher <end> <assistant>"
MAX_TURNS = 3


def parse(text):
    messages = re.findall(r"<(user|assistant)>(.*?)(<end>|$)", text, re.DOTALL)
    return lazy_stack(
        [
            History(role=role, content=content.strip(), is_complete=bool(end))
            for role, content, end in messages
        ]
    )


add_chat_template("tiny_chat", TEMPLATE, inverse_parser=parse)


class Reply(Transform):
    """Rewards each word that the policy says, answers, and ends the dialog at some words."""

    def __init__(self, mode, may_end):
        super().__init__()
        self.mode, self.may_end = mode, may_end

    def _step(self, tensordict, next_tensordict):
        if self.mode == "history":
            histories = next_tensordict["history"].prompt.unbind(0)
            said = [history[-1].content for history in histories]
            answer = History(role="user", content="higher", batch_size=(1,))
            next_tensordict["history"].prompt = lazy_stack(
                [history.extend(answer, inplace=False, dim=0) for history in histories]
            )
        else:
            said = list(tensordict["text"].response)
            next_tensordict["text"].prompt = [
                text + ANSWER for text in next_tensordict["text"].prompt
            ]
        words = [text.split() for text in said]
        next_tensordict["reward"] = torch.tensor([[float(len(each))] for each in words])
        if self.may_end:
            ended = torch.tensor([[not {"lower", "higher"}.isdisjoint(each)] for each in words])
            next_tensordict["done"] = next_tensordict["terminated"] = ended
        return next_tensordict

    def transform_reward_spec(self, reward_spec):
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1))
        return reward_spec


def make_collector(mode, num_envs, *, count_trajs=False, **kwargs):
    """A collector of dialogs that are the same ones each time."""
    torch.manual_seed(0)
    model, tokenizer = tiny_chat_model(WORDS, hidden_size=32, intermediate_size=64)
    tokenizer.chat_template = TEMPLATE
    # TransformersWrapper leaves out whatever looks like padding, also if it was sampled.
    model.generation_config.suppress_tokens = [tokenizer.pad_token_id]
    questions = DataLoader(
        [f"guess {i}" for i in range(4)],
        collate_fn=lambda queries: TensorDict({"query": queries}, [len(queries)]),
    )
    env = ChatEnv.from_dataloader(
        questions, batch_size=(num_envs,), repeats=2, tokenizer=tokenizer, input_mode=mode
    )
    # TransformersWrapper takes histories of one length: several dialogs must go in step.
    env = env.append_transform(Reply(mode, may_end=mode == "text" or num_envs == 1))
    env = env.append_transform(StepCounter(max_steps=MAX_TURNS))
    if count_trajs:
        env = env.append_transform(TrajCounter())
    policy = TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode=mode,
        pad_output=False,
        return_log_probs=True,
        generate_kwargs={"max_new_tokens": 5, "do_sample": True},
        chat_template_name="tiny_chat" if mode == "history" else None,
    )
    return LLMCollector(
        env, policy=policy, dialog_turns_per_batch=4, total_dialog_turns=24, **kwargs
    )


def make_buffer(cls=ReplayBuffer, *, batch_size=3, **kwargs):
    sampler = EpisodeSampler(replacement=False)
    return buffer_of(100, sampler, cls=cls, batch_size=batch_size, **kwargs)


def fill(rb, mode, num_envs, **kwargs):
    collector = make_collector(mode, num_envs, replay_buffer=rb, **kwargs)
    for _ in collector:
        pass
    return collector


def plain_steps(data):
    """The steps of a batch, row after row."""
    if data.ndim > 1:
        return [step for row in data.unbind(0) for step in plain_steps(row)]
    return makers.steps(data)


@functools.lru_cache
def dialogs(mode, num_envs, **kwargs):
    """The dialogs that the collector gives without a buffer: those that end, and the others."""
    begun = [[] for _ in range(1 if kwargs else num_envs)]
    ended = []
    for batch in make_collector(mode, num_envs, **kwargs):
        for row, steps in enumerate(batch.unbind(0) if batch.ndim > 1 else [batch]):
            for step, told in zip(steps.unbind(0), plain_steps(steps), strict=True):
                begun[row].append(told)
                if step["next", "done"].any():
                    ended.append(begun[row])
                    begun[row] = []
    return ended, [steps for steps in begun if steps]


@pytest.mark.parametrize("cls", [ReplayBuffer, slow(TensorDictReplayBuffer)])
@pytest.mark.parametrize(
    ("mode", "num_envs"), [slow("history", 1), slow("history", 2), ("text", 2)]
)
def test_batches_of_turns_become_dialogs(cls, mode, num_envs):
    rb = make_buffer(cls)
    collector = make_collector(mode, num_envs, replay_buffer=rb, flatten_data=False)
    cut = [len(rb.writer.open_episodes) for _ in collector]
    assert any(cut)
    ended, unfinished = dialogs(mode, num_envs)
    assert [plain_steps(episode) for episode in rb.storage.episodes()] == ended
    assert [plain_steps(episode) for episode in rb.writer.open_episodes.values()] == unfinished
    for episode in rb.storage.episodes():
        assert episode["step_count"].flatten().tolist() == list(range(len(episode)))
        assert mode == "text" or isinstance(episode["history"].prompt, History)
    assert len(set(rb.storage.lengths.tolist())) > 1 or (mode, num_envs) == ("history", 2)


@pytest.mark.parametrize("yield_only_last_steps", [slow(False), True])
@pytest.mark.parametrize(
    ("mode", "num_envs"), [("history", 1), slow("history", 2), slow("text", 2)]
)
def test_completed_dialogs_are_stored_as_they_come(mode, num_envs, yield_only_last_steps):
    kwargs = {"yield_completed_trajectories": True}
    kwargs |= {"yield_only_last_steps": True} if yield_only_last_steps else {}
    rb = make_buffer()
    fill(rb, mode, num_envs, **kwargs)
    ended, unfinished = dialogs(mode, num_envs, **kwargs)
    assert not unfinished
    assert [plain_steps(episode) for episode in rb.storage.episodes()] == ended
    assert (rb.storage.lengths == 1).all() == yield_only_last_steps
    assert not rb.writer.open_episodes


def test_flat_batches_of_several_environments_need_ids():
    rb = make_buffer(writer=EpisodeWriter(traj_key="traj_count"))
    fill(rb, "text", 2, count_trajs=True)
    for episode in rb.storage.episodes():
        assert episode["step_count"].flatten().tolist() == list(range(len(episode)))
        assert len(episode["traj_count"].unique()) == 1
    assert rb.storage.num_episodes + len(rb.writer.open_episodes) > 8


@pytest.mark.parametrize(("mode", "num_envs"), [slow("history", 1), ("text", 2)])
def test_sampled_dialogs_become_training_rows(mode, num_envs):
    rb = make_buffer(batch_size=4)
    fill(rb, mode, num_envs, yield_completed_trajectories=True)
    turns = rb.sample()
    rows = MergeTurns()(turns)
    trained = rows["masks", "all_assistant_mask"]
    assert rows["log_probs", "full"][trained].isfinite().all()
    assert set(rows["episode"].tolist()) == set(range(4))

    def sampled(*key):
        return sorted(x for step in turns.unbind(0) for x in step.get(key).tolist())

    assert sorted(rows["tokens", "full"][trained].tolist()) == sampled("tokens", "response")
    assert sorted(rows["log_probs", "full"][trained].tolist()) == sampled("log_probs", "response")
    assert rows["rewards", "full"].sum() == turns["next", "reward"].sum()


@pytest.mark.slow
def test_mc_advantage_writes_whole_groups():
    rb = make_buffer(TensorDictReplayBuffer, batch_size=2)
    rb.append_transform(MCAdvantage(grpo_size=2, trajectory_return="sum"))
    fill(rb, "history", 1, yield_completed_trajectories=True)
    pairs = rb.storage.num_episodes // 2
    assert pairs >= 4
    episodes = list(rb.storage.episodes())
    for pair in zip(episodes[::2], episodes[1::2], strict=True):
        assert len({query for episode in pair for query in episode["query"]}) == 1
        returns = torch.stack([episode["next", "reward"].sum() for episode in pair])
        expected = (returns - returns.mean()) / returns.std().clamp_min(1e-6)
        for episode, advantage in zip(pair, expected, strict=True):
            assert torch.allclose(episode["advantage"], advantage.expand(len(episode), 1))
    # What is sampled has the advantages, and TorchRL's own storage takes it from there.
    sample = rb.sample()
    theirs = ReplayBuffer(
        storage=LazyStackStorage(100),
        sampler=SamplerWithoutReplacement(shuffle=False),
        batch_size=len(sample),
    )
    theirs.extend(sample)
    assert plain_steps(theirs.sample()) == plain_steps(sample)
