"""Three turns with observations between them: the numbers of docs/credit.rst."""

import re
from pathlib import Path

import pytest
import torch

from torchrl_mt.objectives.functional import bilevel_gae, masked_gae, turn_gae

#          prompt | turn 0 | observation | turn 1 | observation | turn 2 | observation
SAMPLED = [0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0]
TURNS = [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3]
MASK, TURN = torch.tensor([SAMPLED]).bool(), torch.tensor([TURNS])
VALUE = torch.zeros(1, 16)


def reward_at(position):
    return torch.nn.functional.one_hot(torch.tensor([position]), 16).float()


def suffix_gae(reward, value, mask, gamma, lmbda):
    """What assumes that all from the first sampled token on is the policy's: masked, but in time."""
    reward, value = reward * mask, value * mask
    out, a = torch.zeros_like(reward), torch.zeros(len(reward))
    for t in reversed(range(reward.shape[1])):
        later = value[:, t + 1] if t + 1 < value.shape[1] else 0.0
        out[:, t] = a = reward[:, t] + gamma * later - value[:, t] + gamma * lmbda * a
    return out * mask


def estimates(position):
    """Advantages at the sampled tokens, for a reward of 1 at ``position``."""
    batch = reward_at(position), VALUE, MASK
    within = {"turn_gamma": 1.0, "turn_lmbda": 0.95}
    return {
        "masked_gae": masked_gae(*batch, 1.0, 0.95)[0][MASK],
        "turn_gae": turn_gae(*batch, TURN, 1.0, 0.95)[0][MASK],
        "bilevel_gae": bilevel_gae(*batch, TURN, 1.0, 0.95, **within)[0][MASK],
        "suffix mask": suffix_gae(*batch, 1.0, 0.95)[MASK],
    }


def test_the_docs_show_these_numbers():
    page = Path(__file__).parents[3] / "docs" / "credit.rst"
    tables = page.read_text().split(".. credit-table: reward at ")[1:]
    assert [int(re.match(r"\d+", t).group()) for t in tables] == [13, 14]
    for position, table in zip([13, 14], tables, strict=True):
        for name, expected in estimates(position).items():
            row = re.search(rf"\* - .*{name}.*\n((?:     - [-.\d]+\n){{6}})", table)
            shown = [float(x) for x in re.findall(r"[-.\d]+", row.group(1).replace(" - ", " "))]
            assert shown == pytest.approx(expected.tolist(), abs=5e-5), (name, expected.tolist())
