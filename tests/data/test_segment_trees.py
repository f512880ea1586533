import subprocess
import sys
import textwrap

import pytest
import torch
from torchrl.data.replay_buffers.samplers import prioritized

from torchrl_mt.data import segment_trees as module
from torchrl_mt.data.segment_trees import segment_trees


def run(code):
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # TorchRL logs to the standard output, too.
    return [line[6:] for line in done.stdout.splitlines() if line.startswith("told: ")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_trees_give_sums_and_minima(dtype):
    sums, minima = (cls(11) for cls in segment_trees(dtype))
    values = torch.rand(11, dtype=dtype, generator=torch.Generator().manual_seed(0))
    index = torch.randperm(11)
    sums[index], minima[index] = values, values
    assert torch.equal(sums[index], values)
    assert minima.query(0, 11) == values.min()
    assert sums.query(0, 11) == pytest.approx(values.sum().item())
    ordered = torch.empty_like(values)
    ordered[index] = values
    mass = torch.rand(100, dtype=dtype) * ordered.sum() * 0.999
    expected = torch.searchsorted(ordered.cumsum(0), mass)
    assert torch.equal(sums.scan_lower_bound(mass), expected)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"torch.float32 or torch.float64, got torch.float16"):
        segment_trees(torch.float16)


def test_the_trees_of_torchrl_are_preferred(monkeypatch):
    monkeypatch.setattr(prioritized, "SumSegmentTreeFp32", "sums")
    monkeypatch.setattr(prioritized, "MinSegmentTreeFp32", "minima")
    assert segment_trees(torch.float32) == ("sums", "minima")


def test_without_the_extension_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr(prioritized, "SumSegmentTreeFp32", None)
    monkeypatch.setattr(module, "_loaded", None)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="install torchrl from a wheel"):
        segment_trees(torch.float32)


def test_an_extension_that_does_not_load_is_named(monkeypatch, tmp_path):
    broken = tmp_path / "_torchrl.so"
    broken.write_bytes(b"nothing")
    flags = sys.getdlopenflags()
    monkeypatch.setattr(prioritized, "SumSegmentTreeFp32", None)
    monkeypatch.setattr(module, "_loaded", None)
    monkeypatch.setattr(module, "find_spec", lambda name: type("", (), {"origin": str(broken)}))
    with pytest.raises(RuntimeError, match="the releases of torch and torchrl that belong"):
        segment_trees(torch.float32)
    assert sys.getdlopenflags() == flags


def test_torchrl_is_left_as_it_was():
    told = run(
        """
        import sys
        import torch, torchrl
        from torchrl.data.replay_buffers.samplers import prioritized
        before = {k: v for k, v in vars(prioritized).items() if "Tree" in k}
        known = "torchrl._torchrl" in sys.modules, hasattr(torchrl, "_torchrl")
        flags = sys.getdlopenflags()
        from torchrl_mt.data.segment_trees import segment_trees
        segment_trees(torch.float32)
        print("told:", before == {k: v for k, v in vars(prioritized).items() if "Tree" in k})
        print("told:", flags == sys.getdlopenflags())
        print("told:", known == ("torchrl._torchrl" in sys.modules, hasattr(torchrl, "_torchrl")))
        """
    )
    assert told == ["True", "True", "True"]


def test_the_rest_of_torchrl_still_works():
    told = run(
        """
        import torch
        from torchrl_mt.data import PrioritizedClipSampler
        PrioritizedClipSampler(slice_len=2)
        from torchrl.modules import TanhNormal
        from torchrl.modules.distributions.utils import safeatanh, safetanh
        from torchrl.data import LazyTensorStorage, ReplayBuffer
        loc = torch.zeros(4, requires_grad=True)
        dist = TanhNormal(loc, torch.ones(4))
        dist.log_prob(dist.rsample()).sum().backward()
        print("told:", bool(loc.grad.isfinite().all()))
        x = torch.tensor([0.3])
        print("told:", torch.allclose(safeatanh(safetanh(x, 1e-6), 1e-6), x))
        rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
        rb.extend(torch.arange(4))
        print("told:", len(rb.sample()))
        """
    )
    assert told == ["True", "True", "2"]
