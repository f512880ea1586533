"""The page on learning names all that there is, and its numbers are those of the code."""

import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torchrl.objectives.llm.grpo import CISPOLoss

from torchrl_mt.objectives import ExperienceMaker, Passes
from torchrl_mt.objectives.credit import ADVANTAGE_KINDS
from torchrl_mt.objectives.filters import FILTERS
from torchrl_mt.objectives.functional import cispo, ppo
from torchrl_mt.objectives.functional.aggregation import Aggregation
from torchrl_mt.objectives.functional.corrections import CORRECTIONS
from torchrl_mt.objectives.functional.policy.objectives import OBJECTIVES, clip_bounds

PAGE = (Path(__file__).parents[2] / "docs" / "learning.rst").read_text()
RATIOS = torch.tensor([[0.5, 1.0, 1.5, 4.0]])


@pytest.mark.parametrize(
    "name", [*ADVANTAGE_KINDS, *OBJECTIVES, *CORRECTIONS, *get_args(Aggregation), *FILTERS]
)
def test_every_name_is_on_the_page(name):
    assert f'``"{name}"``' in PAGE


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_bounds_are_the_objectives(name):
    table = PAGE.split("- ``clip_epsilon``")[1]
    shown = re.search(rf'\* - [^*]*``"{name}"``.*\n     - .*\n     -(.*)\n', table).group(1)
    bounds = tuple(map(float, re.findall(r"\d+\.\d+", shown)))
    assert bounds == (clip_bounds(OBJECTIVES[name]) or ())


def test_every_metric_is_on_the_page(model, other_model, rows):
    maker = ExperienceMaker(
        model,
        ref=other_model,
        passes=Passes(with_entropy=True),
        reward={"maths": [("episode", 1.0)]},
        advantage="grpo",
        process=["top_entropy", lambda rows: rows],
    )
    batch = rows()
    batch["label"] = ["maths"] * len(batch)
    maker(batch)
    shown = re.findall(r"``([^`]+)``", PAGE.split("- metric")[1].split("\n\n")[0])
    made = set()
    for name in maker.metrics:
        name = (
            name.replace("<lambda>", "<name>")
            .replace("/maths", "/<label>")
            .replace("/episode", "/<source>")
        )
        made.add(re.sub("/(mean|std|count)$", "/*", name))
    assert made <= set(shown)


def slopes(loss_of):
    log_prob = RATIOS.log().requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(log_prob).sum(), log_prob)
    return slope.flatten().tolist()


def test_the_slopes_of_cispo_beside_torchrls():
    mask, one, old = torch.ones(1, 4, dtype=torch.bool), torch.ones(1, 4), torch.zeros(1, 4)
    bounds = SimpleNamespace(_clip_bounds=(torch.tensor(0.8).log(), torch.tensor(1.2).log()))
    expected = {
        "functional.cispo": slopes(lambda x: cispo(x, old, one, mask, (0.2, 0.2))[0]),
        "CISPOLoss": slopes(lambda x: CISPOLoss._compute_policy_objective(bounds, x, one)[0]),
        "functional.ppo": slopes(lambda x: ppo(x, old, one, mask, (0.2, 0.2))[0]),
    }
    table = PAGE.split(".. cispo-table")[1]
    for name, numbers in expected.items():
        row = re.search(rf"\* - .*{name}.*\n((?:     - [-.\d]+\n){{4}})", table).group(1)
        shown = [float(x) for x in re.findall(r"     - (\S+)", row)]
        assert shown == pytest.approx(numbers, abs=5e-3)


def test_the_functions_between_rewards_and_advantages_run(model, rows):
    start = PAGE.index("   def only_groups_with_spread(rows):")
    names = {"torch": torch}
    exec(textwrap.dedent(PAGE[start : PAGE.index("   maker = ", start)]), names)
    batch = rows(n=9)
    batch["group"] = torch.tensor([7, 7, 7, 4, 4, 4, 9, 9, 9])
    batch["rewards", "full"][3:6] = 0.0  # One group's episodes score the same.
    functions = [names["only_groups_with_spread"], names["shorter_is_better"]]
    out = ExperienceMaker(model, process=functions)(batch)
    assert out["group"].tolist() == [7] * 3 + [9] * 3
    length = out["masks", "all_assistant_mask"].sum(-1, keepdim=True)
    expected = out["rewards", "full"] * (1 - length / 4096)
    torch.testing.assert_close(out["rewards", "shaped"], expected)
