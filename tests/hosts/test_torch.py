"""What is private to torch is as this package takes it to be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchrl_mt._hosts.torch import ExactBuffers, is_changed, is_compiled, times_changed

# ---- tensors that may be changed in place -------------------------------------------------------


def test_torch_counts_changes_in_place():
    tensor = torch.arange(3)
    before = times_changed(tensor)
    tensor.clone().add_(1)
    assert times_changed(tensor) == before
    tensor[0] = 7
    assert times_changed(tensor) > before
    before = times_changed(tensor)
    tensor.view(3, 1).add_(1)
    assert times_changed(tensor) > before


def test_torch_counts_nothing_in_inference_mode():
    with torch.inference_mode():
        tensor = torch.arange(3)
        tensor[0] = 7
        assert times_changed(tensor) == 0


# ---- models that score rows -----------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_modules_are_told_from_others():
    compiled = nn.Linear(1, 1)
    assert not is_compiled(compiled)
    assert is_compiled(torch.compile(compiled))
    compiled.compile()
    assert is_compiled(compiled)


def test_hooks_and_other_forwards_are_seen():
    for change in (
        lambda layer: layer.register_forward_hook(print),
        lambda layer: layer.register_forward_pre_hook(print),
        lambda layer: setattr(layer, "forward", print),
    ):
        layer = nn.Linear(1, 1)
        assert not is_changed(layer)
        change(layer)
        assert is_changed(layer)


def test_buffers_keep_their_type_whoever_casts_the_module():
    module = ExactBuffers()
    module.register_buffer("count", torch.tensor(257.0))
    module.weight = nn.Parameter(torch.ones(1))
    for cast in (module.bfloat16, module.half, lambda: module.to(torch.float16)):
        cast()
        assert module.count.dtype is torch.float32
        assert module.count == 257
        assert module.weight.dtype is not torch.float32
