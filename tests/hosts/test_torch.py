"""What is private to torch is as this package takes it to be."""

from __future__ import annotations

import torch

from torchrl_mt._hosts.torch import times_changed

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
