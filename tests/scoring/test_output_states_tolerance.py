"""States stand for logits only if those made of them are the model's own to rounding."""

import pytest
import torch
from torch import nn

from torchrl_mt.scoring.log_probs import row_log_probs
from torchrl_mt.scoring.output_head import OutputStates, output_states

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 1e-3}
MORE = {torch.float32: 1e-3, torch.bfloat16: 0.05}


class Changed(nn.Module):
    """A language model whose logits are its output layer's but for a share of them."""

    def __init__(self, by, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(24, 16)
        self.head = nn.Linear(16, 24)
        self.by = by
        self.to(dtype)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, attention_mask=None):
        logits = self.head(self.table(input_ids)).float()
        return logits + self.by * logits.abs().max() * torch.linspace(-1, 1, 24)


def given_by(by, dtype):
    model = Changed(by, dtype)
    ids = torch.arange(24).view(2, 12)
    return model, output_states(model, {"input_ids": ids})


@pytest.mark.parametrize("dtype", ROUNDING)
def test_rounding_is_not_taken_for_another_layer(dtype):
    _, states = given_by(ROUNDING[dtype], dtype)
    assert isinstance(states, OutputStates)


@pytest.mark.parametrize("dtype", MORE)
@pytest.mark.parametrize("factor", [1, 10])
def test_what_is_more_than_rounding_has_its_own_logits(dtype, factor):
    by = factor * MORE[dtype]
    model, states = given_by(by, dtype)
    assert isinstance(states, torch.Tensor)
    ids = torch.arange(24).view(2, 12)
    ones = torch.ones(2, 12, dtype=torch.bool)
    expected = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    got = row_log_probs(model, ids, ones, ones)[0][:, 1:]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
