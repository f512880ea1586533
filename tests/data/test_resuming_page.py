"""The page on replay says how a run is resumed: as it says, the run goes on as if nothing had been."""

import copy
import shutil

import pytest
import torch
from torchrl.data import AdaptiveKLController

from tests.buffers import buffer_of
from tests.pages import code_of
from tests.tiers import slow
from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.data import EpisodeSampler, EpisodeStorage
from torchrl_mt.datasets import RunCheckpoint
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import GuessNumber
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, RewardMix, ValueModel
from torchrl_mt.objectives.functional import RewardNormalizer
from torchrl_mt.testing import tiny_chat_model
from torchrl_mt.transforms import MergeTurns


def parts(seed, adaptive):
    """All parts of a run, by the names that the page gives them."""
    torch.manual_seed(seed)
    model, tokenizer = tiny_chat_model("guess to higher lower correct invalid 1 2 3 4")
    engine = TransformersEngine(model, tokenizer, share_weights=False)
    buffer = buffer_of(
        EpisodeStorage(1000, max_episodes=24),
        EpisodeSampler(group_key="group", group_size=4, replacement=False),
        transform=MergeTurns(),
        batch_size=2,
        seed=0,
    )
    collector = MultiTurnCollector(
        GuessNumber(4, turns=2),
        engine,
        list(GuessNumber.data(16, numbers=4)),
        episodes_per_batch=8,
        group_size=4,
        limits=Limits(max_response_tokens=4),
        sampling={"seed": 0},
        replay_buffer=buffer,
    )
    kl_coef = AdaptiveKLController(init_kl_coef=0.1, target=1.0, horizon=50) if adaptive else 0.1
    maker = ExperienceMaker(
        model,
        ref=copy.deepcopy(model),
        critic=ValueModel.from_model(copy.deepcopy(model)),
        advantage="gae",
        reward=RewardMix("episode", transform=RewardNormalizer()),
        kl_coef=kl_coef,
    )
    loss = MultiTurnLoss(model, critic=maker.critic)
    optimizer = torch.optim.AdamW(loss.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5 ** (update**2))
    return locals()


def update(run):
    """Train once; what the update was made of."""
    rows = run["maker"](run["buffer"].sample())
    out = run["loss"](rows)
    (out["loss_objective"] + out["loss_critic"]).backward()
    run["optimizer"].step()
    run["scheduler"].step()
    run["optimizer"].zero_grad()
    run["collector"].update_policy_weights_(run["model"])
    weights = sum(float(p.detach().double().square().sum()) for p in run["loss"].parameters())
    version, stored = run["collector"].policy_version, len(run["buffer"])
    tokens = rows["tokens", "full"].tolist()
    lr = run["scheduler"].get_last_lr()[0]
    data = (rows["episode_index"].tolist(), tokens, version, stored)
    return data, (weights, lr, run["maker"].metrics["kl_coef"])


class Killed(Exception):
    """Stands for the end of the process."""


def follow_the_page(seed, adaptive, end, before=lambda number: None):
    """Do as the page says, until the run is killed in update ``end``; what its updates were made of."""
    run, seen = parts(seed, adaptive), []
    code = code_of("checkpoints.rst", "Resuming a run")

    def one_update():
        number = run["scheduler"].last_epoch + 1
        before(number)
        seen.append(update(run))
        if number == end:
            raise Killed

    try:
        with pytest.raises(Killed):
            exec(code, run | {"RunCheckpoint": RunCheckpoint, "update": one_update})
    finally:
        run["collector"].shutdown()
        run["engine"].close()
    return seen


@pytest.mark.parametrize("adaptive", [True, slow(False)])
def test_a_run_that_is_resumed_as_the_page_says_goes_on_as_it_would_have(
    tmp_path, monkeypatch, adaptive
):
    def copy_checkpoints(number):
        if number == 3:
            shutil.copytree("checkpoints", tmp_path / "killed" / "checkpoints")

    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "undisturbed")
    expected = follow_the_page(0, adaptive, 4, copy_checkpoints)[2:]
    monkeypatch.chdir(tmp_path / "killed")
    got = follow_the_page(1, adaptive, 4)
    assert [data for data, _ in got] == [data for data, _ in expected]
    for (_, numbers), (_, others) in zip(got, expected, strict=True):
        torch.testing.assert_close(numbers, others, rtol=1e-5, atol=1e-6)
