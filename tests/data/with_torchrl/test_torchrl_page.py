"""The page on TorchRL shows how its losses are given our rows and clips: as it shows, they are right."""

import copy

import torch
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss

from tests.pages import code_of
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss
from torchrl_mt.transforms import MergeTurns


def rows(seed):
    """Rows of two groups of episodes of one or two turns, of several lengths."""
    generator = torch.Generator().manual_seed(seed)

    def turn(prompt, last, episode):
        size = int(torch.randint(1, 4, (1,), generator=generator))
        response = torch.randint(3, 20, (size,), generator=generator)
        return TensorDict(
            {
                "tokens": {"prompt": prompt, "response": response},
                "log_probs": {"response": -3 * torch.rand(size, generator=generator)},
                "group": torch.tensor(episode // 2),
                "collector": {"traj_ids": torch.tensor(episode)},
                "next": {
                    "reward": torch.rand(1, generator=generator),
                    "done": torch.tensor([last]),
                },
            }
        )

    turns = []
    for episode in range(4):
        turns.append(turn(torch.tensor([1, 4, 5]), episode % 2 == 0, episode))
        if episode % 2:
            before = torch.cat([turns[-1]["tokens", "prompt"], turns[-1]["tokens", "response"]])
            turns.append(turn(torch.cat([before, torch.tensor([6])]), True, episode))
    return MergeTurns()(lazy_stack(turns))


def gradient(model, loss):
    """A loss and its gradient."""
    model.zero_grad()
    loss.sum().backward()
    return loss.detach().reshape(()), torch.cat([p.grad.flatten() for p in model.parameters()])


def test_grpo_loss_as_the_page_shows_it(model, tokenizer):
    title = "TorchRL's GRPOLoss on our rows"
    plain, with_kl = (code_of("torchrl.rst", title, i) for i in range(2))
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.1 * torch.randn_like(p))
    names = {each.__name__: each for each in (TransformersWrapper, ExperienceMaker, GRPOLoss)}
    names |= {"model": model, "reference": reference, "tokenizer": tokenizer, "rows": rows(0)}
    exec(plain, names)
    ours = MultiTurnLoss(model, objective="ppo", aggregation="token_mean", kl_coef=0.1)
    theirs = gradient(model, names["loss_module"](names["rows"]).loss_objective)

    names["rows"] = rows(0)
    exec(with_kl, names)
    expected = ours(names["rows"])
    torch.testing.assert_close(
        theirs, gradient(model, expected["loss_objective"]), atol=1e-5, rtol=1e-5
    )
    out = names["loss_module"](names["rows"])
    # The page: a mean over all places of the rows, ours is one over the sampled tokens.
    share = names["rows"]["masks", "all_assistant_mask"].float().mean()
    assert 0.1 < share < 0.9
    kl = ours(names["rows"])["loss_kl"] * share
    assert kl > 1e-3
    torch.testing.assert_close(
        gradient(model, out.loss_kl_to_ref), gradient(model, kl), atol=1e-5, rtol=1e-5
    )
