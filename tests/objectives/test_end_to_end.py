"""From games that a model plays to gradients in all of its parameters, whatever is chosen between."""

import copy
from contextlib import closing
from functools import partial
from itertools import cycle
from typing import get_args

import pytest
import torch
from tensordict import TensorDict

from tests.faulty_server import running
from tests.objectives.helpers import WORDS, objective_of
from tests.objectives.rewards.reward_server import RewardServer
from tests.scoring.helpers import DEVICES
from tests.tiers import pairs
from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import GuessNumber
from torchrl_mt.objectives import (
    ExperienceMaker,
    MultiTurnLoss,
    Passes,
    RemoteReward,
    ValueLoss,
    ValueModel,
)
from torchrl_mt.objectives.credit import ADVANTAGE_KINDS
from torchrl_mt.objectives.functional import geometric
from torchrl_mt.objectives.functional.aggregation import Aggregation
from torchrl_mt.objectives.functional.corrections import CORRECTIONS
from torchrl_mt.objectives.functional.policy.objectives import OBJECTIVES, clip_bounds
from torchrl_mt.testing import tiny_chat_model
from torchrl_mt.transforms import MergeTurns


@pytest.fixture(scope="module")
def chat():
    """A model that plays at random, and its tokenizer."""
    torch.manual_seed(0)
    return tiny_chat_model(WORDS)


def play(chat, env, data, **options):
    """Rows of the games of one batch."""
    model, tokenizer = chat
    with (
        closing(TransformersEngine(model, tokenizer)) as engine,
        MultiTurnCollector(env, engine, data, **options) as collector,
    ):
        (turns,) = list(collector)
    return MergeTurns(pad_token_id=tokenizer.pad_token_id)(turns)


@pytest.fixture(scope="module")
def games(chat) -> TensorDict:
    """Rows of 8 games in 2 groups, of up to 3 turns."""
    env = GuessNumber(8, 3, prompt="guess 1 to {numbers}")
    options = {"episodes_per_batch": 8, "total_episodes": 8, "group_size": 4}
    options["limits"] = Limits(max_turns=3, max_response_tokens=4)
    rows = play(chat, env, GuessNumber.data(numbers=8), **options)
    assert len(rows["group"].unique()) == 2
    return rows


@pytest.fixture
def rows(games):
    return games.clone()


@pytest.fixture
def actor(chat):
    return copy.deepcopy(chat[0]).eval()


@pytest.fixture
def critic(chat):
    critic = ValueModel.from_model(copy.deepcopy(chat[0])).eval()
    torch.manual_seed(1)
    torch.nn.init.normal_(critic.head.weight)
    return critic


def moved(model):
    """A copy whose parameters are a little elsewhere."""
    model, g = copy.deepcopy(model), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * torch.randn(p.shape, generator=g).to(p.device)
    return model


def parity(rows):
    """A reward that random games have, too."""
    return 1.0 + (rows["tokens", "full"] * rows["masks", "all_assistant_mask"]).sum(-1) % 3


def train(loss, rows):
    """One backward pass: everything finite, and every parameter reached."""
    out = loss(rows)
    assert set(out.keys()) == set(loss.out_keys)
    assert all(value.isfinite() for value in out.values())
    objective_of(out).backward()
    for name, p in loss.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert p.grad.any(), name
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "packed"), pairs(ADVANTAGE_KINDS, [False, True]))
def test_every_advantage_trains_actor_and_critic(rows, actor, critic, kind, packed, device):
    rows, actor, critic = (x.to(device) for x in (rows, actor, critic))
    old_critic = copy.deepcopy(critic)
    maker = ExperienceMaker(
        moved(actor),
        ref=moved(moved(actor)),
        critic=old_critic,
        reward=[("episode", 1.0), (parity, 0.5)],
        advantage=kind,
        gamma=0.9,
        kl_coef=0.0 if kind == "gdpo" else 0.01,
        process="clip_filter",
        old_log_probs="actor",
        passes=Passes(packed=packed, micro_batch_tokens=64),
    )
    experience = maker(rows)
    assert experience["advantage"].isfinite().all()
    assert experience["advantage"].any()
    loss = MultiTurnLoss(
        actor,
        critic=ValueLoss(critic, clip_value=0.5),
        kl_coef=0.1,
        entropy_coef=0.01,
        correction="token_tis",
        passes=Passes(packed=packed),
    )
    out = train(loss, experience)
    assert 0 < out["ess"] <= 1
    assert out["correction_ess"] < 1


@pytest.fixture(scope="module")
def experience(chat, games) -> TensorDict:
    """The games under a policy that has moved since, with a reference."""
    model = chat[0].eval()
    maker = ExperienceMaker(
        moved(model), ref=moved(moved(model)), reward=parity, old_log_probs="actor"
    )
    return maker(games.clone())


@pytest.mark.parametrize(
    ("objective", "aggregation"),
    list(zip(OBJECTIVES, cycle(get_args(Aggregation)), strict=False)),
)
def test_every_objective_and_aggregation_trains(experience, actor, objective, aggregation):
    correction = ["icepop", "token_tis"]
    if objective == "decoupled_ppo":
        correction = partial(geometric, bounds=(0.5, 2.0))
    elif objective == "sft":
        correction = None
    options = {"objective": objective, "aggregation": aggregation, "correction": correction}
    options["clip_epsilon"] = 0.9 if clip_bounds(OBJECTIVES[objective]) else None
    train(MultiTurnLoss(actor, **options), experience.clone())


@pytest.mark.parametrize("sequence", ["row", "turn"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction_trains(experience, actor, correction, sequence):
    if correction == "geometric":
        correction = partial(geometric, bounds=(0.5, 2.0))
    objective = "gspo" if sequence == "turn" else "ppo"
    loss = MultiTurnLoss(
        actor, objective=objective, correction=correction, sequence=sequence, clip_epsilon=0.9
    )
    out = train(loss, experience.clone())
    assert out["correction_ess"] > 0


def test_labels_and_references_come_from_the_items_of_data(chat):
    pytest.importorskip("httpx")
    model, tokenizer = chat
    items = [
        {"number": n, "label": "hard" if n % 2 else "easy", "reference": {"answer": n}}
        for n in (1, 2, 3, 4)
    ]
    limits = Limits(max_turns=2, max_response_tokens=3)
    env = GuessNumber(8, 2, prompt="guess 1 to {numbers}")
    rows = play(chat, env, items, episodes_per_batch=4, total_episodes=4, limits=limits)
    assert sorted(rows["label"]) == ["easy", "easy", "hard", "hard"]
    with running(RewardServer()) as server:
        judge = RemoteReward(server.url, tokenizer, name="judge")
        own = [("episode", 1.0)]
        maker = ExperienceMaker(model, reward={"easy": own, "hard": [*own, (judge, 0.5)]})
        shaped = maker(rows.clone())["rewards", "shaped"].sum(-1)
        (sent,) = server.seen
    assert sorted(reference["answer"] for reference in sent["references"]) == [1, 3]
    expected = rows["rewards", "full"].sum(-1)
    for n, label in enumerate(rows["label"]):
        if label == "hard":
            kept = rows["masks", "all_attention_mask"][n]
            text = tokenizer.decode(rows["tokens", "full"][n][kept].tolist())
            expected[n] += 0.5 * len(text.split())
            assert text in sent["queries"]
    torch.testing.assert_close(shaped, expected)
    assert maker.metrics["reward/hard/judge/count"] == 2
    assert "reward/easy/judge/mean" not in maker.metrics
