"""Filters weigh the objective by rows and tokens, by group id and over the whole batch."""

from functools import partial

import pytest
import torch

from torchrl_mt.objectives import ExperienceMaker, Passes
from torchrl_mt.objectives.filters import clip_filter, top_entropy

WEIGHTS = ("weights", "full")


def scored_rows(rows, outcome):
    """Rows of one-row episodes, each group a pair, whose episodes' scores are those given."""
    batch = rows(n=len(outcome), suffix_padding=False)
    mask = batch["masks", "all_assistant_mask"]
    batch["episode"] = torch.arange(len(outcome)).flip(0)
    batch["group"] = torch.arange(len(outcome)) // 2 * 5
    batch["turns", "full"] = torch.zeros_like(batch["turns", "full"])
    batch["rewards", "full"] = torch.zeros(mask.shape)
    for n, score in enumerate(outcome):
        assert mask[n].any()
        batch["rewards", "full"][n, mask[n].nonzero()[-1, 0]] = score
    return batch


SCORES = [1.0, 0.0, 0.5, 0.5, 2.0, 2.0, 0.0, 3.0]
SPREAD = torch.tensor([True, True, False, False, False, False, True, True])


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("advantage", ["grpo", "turn"])
def test_groups_without_spread_get_no_weight(model, other_model, rows, advantage, kl_coef):
    """Whatever the KL adds to the rewards: it differs between any two episodes."""
    options = {"ref": other_model, "kl_coef": kl_coef, "advantage": advantage}
    batch = scored_rows(rows, SCORES)
    mask = batch["masks", "all_assistant_mask"]
    plain = ExperienceMaker(model, **options)(batch.clone())
    for name, factor in [("dynamic_sampling", 1.0), ("clip_filter", 2.0)]:
        maker = ExperienceMaker(model, process=name, **options)
        out = maker(batch.clone())
        assert torch.equal(out[WEIGHTS], factor * (mask & SPREAD[:, None]))
        assert torch.equal(out["advantage"], plain["advantage"])
        assert WEIGHTS in maker.out_keys
        assert "group" in maker.in_keys
        assert maker.metrics["kept_fraction"] == pytest.approx(
            int((mask & SPREAD[:, None]).sum()) / int(mask.sum())
        )
    assert WEIGHTS not in plain.keys(True)


def test_equal_scores_are_no_spread_in_whatever_order_they_were_earned(model, rows):
    batch = rows(n=2, s=40, suffix_padding=False)
    batch["episode"], batch["group"] = torch.tensor([0, 1]), torch.tensor([0, 0])
    batch["rewards", "full"].zero_()
    parts = [0.1, 0.2, 0.7, 1e-3, 5.0, 0.3]
    for n, order in enumerate((parts, parts[::-1])):
        places = batch["masks", "all_assistant_mask"][n].nonzero()[: len(parts), 0]
        batch["rewards", "full"][n, places] = torch.tensor(order)
    out = ExperienceMaker(model, advantage="grpo", process="dynamic_sampling")(batch)
    assert not out["weights", "full"].any()
    assert not out["advantage"].any()


def test_rejected_rows_neither_make_spread_nor_have_weight(model, rows):
    batch = scored_rows(rows, [1.0, 0.0, 0.5, 0.5])
    batch["valid"] = torch.tensor([True, False, True, True])
    assert not ExperienceMaker(model, process="dynamic_sampling")(batch)[WEIGHTS].any()
    batch["valid"] = torch.ones(4, dtype=torch.bool)
    assert ExperienceMaker(model, process="dynamic_sampling")(batch)[WEIGHTS].any()


@pytest.mark.parametrize("rho", [0.2, 0.6])
def test_the_least_certain_tokens_alone_have_weight(model, rows, rho):
    maker = ExperienceMaker(
        model, passes=Passes(with_entropy=True), process=partial(top_entropy, rho=rho)
    )
    batch = rows(n=8)
    batch["valid"] = batch["episode"] != batch["episode"][3]
    out = maker(batch)
    mask = batch["masks", "all_assistant_mask"] & batch["valid"][:, None]
    entropy = out["entropy"][mask]
    kept = -(-rho * len(entropy) // 1)
    threshold = entropy.sort(descending=True).values[int(kept) - 1]
    assert torch.equal(out[WEIGHTS], ((out["entropy"] >= threshold) & mask).float())


def test_several_multiply_and_keys_may_be_set(model, rows):
    def half(rows):
        assert rows["rewards", "episode"].shape == rows.batch_size
        assert "entropy" in rows
        rows[WEIGHTS] = 0.5 * rows[WEIGHTS]
        return rows

    batch = scored_rows(rows, SCORES)
    maker = ExperienceMaker(
        model,
        passes=Passes(with_entropy=True),
        process=[partial(clip_filter, max_weight=1.5), half, "top_entropy"],
    )
    out = maker(batch.clone())
    assert set(out[WEIGHTS].unique().tolist()) == {0.0, 0.75}
    batch.rename_key_("group", "family")
    maker.set_keys(group="family", weight="w", entropy="h")
    other = maker(batch)
    assert torch.equal(other["w"], out[WEIGHTS])
    assert WEIGHTS not in other.keys(True)


def test_entropies_may_be_another_makers_and_are_missed_before_any_model_runs(
    model, other_model, rows, monkeypatch
):
    batch = ExperienceMaker(model, passes=Passes(with_entropy=True))(rows())
    expected = ExperienceMaker(model, passes=Passes(with_entropy=True), process="top_entropy")(
        rows()
    )
    maker = ExperienceMaker(other_model, ref=model, process=[partial(top_entropy, rho=0.2)])
    assert "entropy" in maker.in_keys
    torch.testing.assert_close(maker(batch)[WEIGHTS], expected[WEIGHTS])
    monkeypatch.setattr(type(model), "forward", None)
    with pytest.raises(KeyError, match="'entropy'; ExperienceMaker writes it"):
        maker(rows())
