import subprocess
import sys

import pytest
import torch

from torchrl_mt.data.samplers.priorities.segment_trees import MinTree, SumTree

SIZES = [1, 2, 31, 2047, 2048, 2049, 40_000, 140_000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_trees_follow_what_changes(size, dtype):
    generator = torch.Generator().manual_seed(size)
    leaves = torch.rand(size, dtype=dtype, generator=generator)
    # Eighths add up exactly, in whatever order.
    leaves = (leaves * 64).round() / 8
    sums, minima = SumTree(leaves), MinTree(leaves - 4)
    for _ in range(5):
        index = torch.randperm(size, generator=generator)[: size // 3 + 1]
        changed = torch.randint(0, 64, index.shape, generator=generator).to(dtype) / 8
        leaves[index] = changed
        sums[index], minima[index] = changed, changed - 4
        assert sums.root == float(leaves.sum())
        assert minima.root == float(leaves.min() - 4)
        assert torch.equal(sums[torch.arange(size)], leaves)
    mass = torch.rand(500, dtype=dtype, generator=generator) * leaves.sum() + 1e-3
    mass = torch.cat([mass.clamp_(max=float(leaves.sum())), leaves.cumsum(0)[leaves > 0]])
    expected = torch.searchsorted(leaves.cumsum(0), mass)
    assert torch.equal(sums.find(mass), expected)


@pytest.mark.parametrize("size", [2000, 40_000, 140_000])
def test_rounded_sums_lead_to_leaves(size):
    generator = torch.Generator().manual_seed(0)
    leaves = torch.rand(size, generator=generator) ** 8
    tree = SumTree(leaves)
    mass = torch.rand(100_000, generator=generator) * tree.root
    reached = leaves.double().cumsum(0)[tree.find(mass).clamp_(max=size - 1)]
    assert (mass.double() - reached).max() < 1e-5 * tree.root
    # A sum that was rounded up is reached by no leaf.
    found = tree.find(torch.tensor([0.0, tree.root * 1.001]))
    assert tree[found].shape == (2,)


@pytest.mark.slow
def test_priorities_need_no_extension_of_torchrl():
    code = """
import sys
sys.modules["torchrl._torchrl"] = None  # its import fails
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import prioritized
from torchrl_mt.data import EpisodeStorage, EpisodeWriter, PrioritizedClipSampler
assert prioritized.SumSegmentTreeFp32 is None
buffer = TensorDictReplayBuffer(
    storage=EpisodeStorage(100), writer=EpisodeWriter(), batch_size=8,
    sampler=PrioritizedClipSampler(alpha=1.0, eps=0.0, slice_len=1),
)
done = torch.arange(10).view(10, 1) == 9
buffer.extend(TensorDict({"step": torch.arange(10), "next": {"done": done}}, [10]))
data = buffer.sample()
data["td_error"] = torch.zeros(8)
buffer.update_tensordict_priority(data)
assert not set(buffer.sample()["step"].tolist()) & set(data["step"].tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
