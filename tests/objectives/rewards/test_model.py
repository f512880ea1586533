"""Reward models: the score at the last attended token, wherever padding lies and whatever fills it."""

import pytest
import torch

from tests.objectives.helpers import reward_model
from tests.settings import grouped
from torchrl_mt.objectives.rewards.model import ModelReward


@pytest.fixture
def classifier(model):
    return reward_model(model).eval()


def alone(classifier, batch):
    """Each row without its padding, the head on the last position by hand."""
    out = []
    for tokens, attended in zip(
        batch["tokens", "full"], batch["masks", "all_attention_mask"], strict=True
    ):
        with torch.no_grad():
            hidden = classifier.model(input_ids=tokens[attended][None]).last_hidden_state
            out.append(classifier.score(hidden[0, -1])[0])
    return torch.stack(out)


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 2}, {"micro_batch_tokens": 13}])
def test_it_is_each_row_alone(classifier, rows, spread, options):
    batch = rows()
    expected = alone(classifier, batch)
    source = ModelReward(classifier, **grouped(**options))
    torch.testing.assert_close(source(batch), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(source(spread(batch)), expected, atol=1e-5, rtol=1e-5)


def test_a_row_that_ends_with_the_padding_token_is_not_cut(classifier, rows):
    batch = rows()
    length = batch["masks", "all_attention_mask"].sum(-1)
    batch["tokens", "full"][torch.arange(6), length - 1] = classifier.config.pad_token_id
    got = ModelReward(classifier)(batch)
    torch.testing.assert_close(got, alone(classifier, batch), atol=1e-5, rtol=1e-5)


class Own(torch.nn.Module):
    """Scores of rows or tokens, in some shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape

    def forward(self, input_ids, attention_mask):
        total = (input_ids * attention_mask).cumsum(-1).float()
        row = total[torch.arange(len(total)), attention_mask.sum(-1) - 1, None]
        shaped = {"n": row[:, 0], "n1": row, "nl": total, "nl1": total[..., None]}
        return (shaped | {"n2": row.expand(-1, 2)})[self.shape]


@pytest.mark.parametrize("shape", ["n", "n1", "nl", "nl1"])
def test_own_models_answer_by_row_or_by_token(rows, spread, shape):
    batch = rows()
    expected = (batch["tokens", "full"] * batch["masks", "all_attention_mask"]).sum(-1).float()
    for x in (batch, spread(batch)):
        assert torch.equal(ModelReward(Own(shape))(x), expected)


def test_models_that_give_no_score_are_refused(classifier, model, rows):
    with pytest.raises(ValueError, match=r"for each of 6 rows.*got shape \(6, 2\)"):
        ModelReward(Own("n2"))(rows())
    with pytest.raises(ValueError, match="for each of 6 rows"):
        ModelReward(model)(rows())
    classifier.config.num_labels = 3
    with pytest.raises(ValueError, match="num_labels=1, got 3"):
        ModelReward(classifier)
