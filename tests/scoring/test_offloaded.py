"""A model that accelerate offloads is scored as one that is not."""

import copy
import itertools

import pytest
import torch
from torch import nn

from tests.objectives.conftest import make_model, make_rows
from tests.scoring.helpers import close, entries
from tests.settings import grouped
from torchrl_mt.objectives import (
    ExperienceMaker,
    MultiTurnLoss,
    ValueModel,
    row_log_probs,
    row_values,
)
from torchrl_mt.scoring.forward import device_of

accelerate = pytest.importorskip("accelerate")
CPU = torch.device("cpu")

OFFLOADS = {
    "all": lambda model, path: accelerate.cpu_offload(model, execution_device=CPU),
    "whole blocks": lambda model, path: accelerate.cpu_offload(
        model, execution_device=CPU, preload_module_classes=[type(model).__name__]
    ),
    "on disk": lambda model, path: accelerate.disk_offload(model, path, execution_device=CPU),
    "by map": lambda model, path: accelerate.dispatch_model(
        model, {"model": "disk", "lm_head": "cpu"}, main_device="cpu", offload_dir=path
    ),
}


@pytest.fixture(params=OFFLOADS)
def offload(request, tmp_path):
    numbers = itertools.count()

    def offloaded(model):
        return OFFLOADS[request.param](copy.deepcopy(model), str(tmp_path / str(next(numbers))))

    return offloaded


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"packed": True}, {"full_logits": True}, {"dtype": torch.bfloat16}],
    ids=["plain", "packed", "full_logits", "bfloat16"],
)
def test_log_probs(offload, tied, options):
    model = make_model(tie_word_embeddings=tied)
    offloaded = offload(model)
    expected = row_log_probs(model, *entries(make_rows()), **grouped(with_entropy=True, **options))
    got = row_log_probs(offloaded, *entries(make_rows()), **grouped(with_entropy=True, **options))
    close(got, expected, 1e-5, 0.0)


@pytest.mark.parametrize("half", [False, True])
def test_values(half):
    critic = ValueModel.from_model(make_model())
    nn.init.normal_(critic.head.weight)
    critic = critic.bfloat16() if half else critic
    offloaded = accelerate.cpu_offload(copy.deepcopy(critic), execution_device=CPU)
    got, expected = (row_values(one, *entries(make_rows())) for one in (offloaded, critic))
    torch.testing.assert_close(got, expected, atol=2e-2 if half else 1e-5, rtol=0.0)
    backbone = accelerate.cpu_offload(make_model(), execution_device=CPU)
    assert ValueModel.from_model(backbone).head.weight.is_cpu


def test_experience_and_loss(offload):
    model, ref = make_model(0), make_model(1)
    options = {"kl_coef": 0.1, "old_log_probs": "actor"}
    expected = ExperienceMaker(model, ref=ref, **options)(make_rows())
    got = ExperienceMaker(offload(model), ref=offload(ref), **options)(make_rows())
    for key in (("log_probs", "ref"), "advantage"):
        torch.testing.assert_close(got[key], expected[key], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        loss, same = MultiTurnLoss(offload(model))(got), MultiTurnLoss(model)(expected)
    torch.testing.assert_close(loss["loss_objective"], same["loss_objective"])


def test_a_model_without_values_is_named():
    with torch.device("meta"):
        model = make_model()
    with pytest.raises(ValueError, match="Qwen2ForCausalLM must have weights with values"):
        row_log_probs(model, *entries(make_rows()))
    assert device_of(make_model()) == CPU
    assert device_of(nn.Identity()) is None
