"""What the package makes has a device of its own: ``torch.set_default_device`` does not reach it."""

from __future__ import annotations

import ast
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

import torchrl_mt
from tests.buffers import buffer_of
from tests.collectors.runs import first_batch
from tests.objectives.conftest import make_model, make_rows
from torchrl_mt.collectors import Limits
from torchrl_mt.data import (
    ClipSampler,
    EpisodeSampler,
    EpisodeStorage,
    EpisodeWriter,
    PrioritizedClipSampler,
)
from torchrl_mt.datasets import ClipDataset, ConversationDataset, load_episodes, save_episodes
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import GuessNumber
from torchrl_mt.objectives import (
    Advantage,
    ExperienceMaker,
    MultiTurnLoss,
    Passes,
    TextReward,
    ValueModel,
    micro_batches,
    split_rows,
)
from torchrl_mt.testing import tiny_chat_model
from torchrl_mt.transforms import DiscountedReturn, MergeTurns

WORDS = ["guess", "to", "higher", "lower", "correct", "invalid", *map(str, range(1, 17))]


@pytest.fixture(scope="module")
def chat():
    return tiny_chat_model(WORDS, hidden_size=32, intermediate_size=64)


@pytest.fixture
def elsewhere():
    """Tensors that do not say their device have no values."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def on_cpu(data):
    assert all(value.is_cpu for value in data.values(True, True) if isinstance(value, torch.Tensor))


def episode(length, **where):
    t = torch.arange(length + 1.0, **where)[:, None]
    ends = {"observation": t[1:], "reward": t[1:].clone(), "done": t[1:] == length}
    return TensorDict({"observation": t[:-1], "next": ends}, [length])


SAMPLERS = {
    "clips": lambda: ClipSampler(slice_len=4),
    "short": lambda: ClipSampler(slice_len=4, strict_length=False),
    "stride": lambda: ClipSampler(slice_len=3, stride=2),
    "episodes": EpisodeSampler,
    "every episode once": lambda: EpisodeSampler(replacement=False),
    "priorities": lambda: PrioritizedClipSampler(slice_len=4),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_buffers(elsewhere, kind):
    data = [episode(n, device="cpu") for n in (7, 5, 9)]
    writer = EpisodeWriter(transform=DiscountedReturn(0.9))
    settings = {"cls": TensorDictReplayBuffer, "writer": writer, "batch_size": 12}
    buffer = buffer_of(20, SAMPLERS[kind](), **settings)
    for part in data:
        buffer.extend(part[:3])
        buffer.extend(part[3:])
    for _ in range(4):
        sample = buffer.sample()
        on_cpu(sample)
    if kind == "priorities":  # TorchRL's buffer makes tensors of its own of these.
        update = partial(buffer.sampler.update_priority, storage=buffer.storage)
        update(sample["index"], sample["observation"][..., 0].abs())
        update([*range(3)], [1.0, 2.0, 3.0])
        on_cpu(buffer.sample())
    on_cpu(buffer[:])
    buffer.load_state_dict(buffer.state_dict())
    on_cpu(buffer.sample())


@pytest.mark.parametrize("format", ["hdf5", "folder", "arrow", "jsonl"])
def test_data_sets(elsewhere, format, tmp_path):
    storage = EpisodeStorage(100)
    for length in (7, 5):
        storage.append(episode(length, device="cpu"))
    save_episodes(storage, tmp_path / "set", format=format)
    back = EpisodeStorage(100)
    load_episodes(tmp_path / "set", back)
    on_cpu(back[:])
    on_cpu(ClipDataset(tmp_path / "set", 3)[1])


def test_conversations(elsewhere, chat):
    messages = [{"role": "user", "content": "guess"}, {"role": "assistant", "content": "to 3"}]
    data = ConversationDataset([{"messages": messages}] * 2, chat[1])
    on_cpu(data.collate([data[0], data[1]]))


def test_makers_and_losses(request):
    rows = {packed: make_rows() for packed in (False, True)}
    actor, ref, backbone = (make_model(seed) for seed in range(3))
    request.getfixturevalue("elsewhere")
    critic = ValueModel.from_model(backbone)
    assert critic.head.weight.device.type == "cpu"
    settings = {"ref": ref, "critic": critic, "kl_coef": 0.1, "old_log_probs": "actor"}
    settings |= {"process": "top_entropy", "advantage": Advantage("gae", whiten=True)}
    for packed, batch in rows.items():
        passes = Passes(with_entropy=True, packed=packed, micro_batch_size=2)
        made = ExperienceMaker(actor, passes=passes, **settings)(batch)
        on_cpu(made)
        loss = MultiTurnLoss(actor, critic=critic, entropy_coef=0.1, passes=Passes(packed=packed))
        for part in micro_batches(made, passes=Passes(micro_batch_tokens=30)):
            loss(part)
        split_rows(made, 2)
        for kind in ("turn", "grpo", "batch"):
            maker = ExperienceMaker(actor, advantage=kind, reward=lambda r: [1.0] * len(r))
            on_cpu(maker(batch))


def test_collectors(elsewhere, chat):
    model, tokenizer = chat
    limits = Limits(max_turns=3, max_response_tokens=3)
    with closing(TransformersEngine(model, tokenizer, seed=1)) as engine:
        data, _ = first_batch(GuessNumber(16, 5), engine, n=4, total_episodes=4, limits=limits)
    transform = MergeTurns(pad_token_id=0)
    buffer = buffer_of(1000, EpisodeSampler(), transform=transform, batch_size=4)
    buffer.extend(data)
    rows = buffer.sample()
    on_cpu(rows)
    reward = TextReward(lambda completions: [1.0] * len(completions), tokenizer)
    MultiTurnLoss(model)(ExperienceMaker(model, reward=reward)(rows))


MAKERS = (
    "arange as_tensor empty eye full linspace ones rand randint randn randperm scalar_tensor "
    "tensor zeros"
)


def test_every_tensor_that_is_made_says_its_device():
    package, silent = Path(torchrl_mt.__file__).parent, []
    makers = {f"torch.{name}" for name in MAKERS.split()}
    for path in package.rglob("*.py"):
        if package / "testing" in path.parents:
            continue  # Models for tests are made where the user's models are.
        for node in ast.walk(ast.parse(path.read_text())):
            made = isinstance(node, ast.Call) and ast.unparse(node.func) in makers
            if made and not any(keyword.arg in ("device", None) for keyword in node.keywords):
                silent.append(f"{path.relative_to(package)}:{node.lineno}")
    assert not silent, f"give these a device: {silent}"
