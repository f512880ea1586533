"""TorchRL's iterable dataset of a buffer gives the clips and episodes of one of ours."""

import pytest
import torch
from torch.utils.data import DataLoader
from torchrl.modules.llm.trl_interop import TorchRLBufferDataset

from tests.buffers import buffer_of
from torchrl_mt.data import ClipSampler, EpisodeSampler
from torchrl_mt.transforms import MergeTurns


def buffer(sampler, data):
    rb = buffer_of(100, sampler, seed=0)
    rb.extend(data)
    return rb


def test_items_are_clips(make):
    data = make.vectors([9, 4, 7])
    plain, rb = (buffer(ClipSampler(slice_len=3, layout="clips"), data) for _ in range(2))
    items = list(TorchRLBufferDataset(rb, batch_size=12, num_batches=2))
    expected = torch.cat([plain.sample(12) for _ in range(2)])
    assert len(items) == len(expected) == 8
    for item, clip in zip(items, expected, strict=True):
        flat = clip.flatten_keys(".")
        assert item.keys() == set(flat.keys())
        assert all(torch.equal(item[key], flat[key]) for key in item)
    loader = DataLoader(TorchRLBufferDataset(rb, batch_size=12), batch_size=4)
    (batch,) = loader
    assert batch["next.observation"].shape == (4, 3, 3)
    assert (batch["step"].diff() == 1).all()


def test_items_are_rows_of_conversations(make):
    turns = make.turns([2, 3, 1])
    for step in turns.tensordicts:
        step["tokens", "prompt"] = torch.cat([torch.tensor([7]), step["tokens", "prompt"]])
    rb = buffer(EpisodeSampler(replacement=False), turns)
    with pytest.raises(RuntimeError, match="stack"):  # Turns vary in length.
        next(iter(TorchRLBufferDataset(rb, batch_size=3)))
    rb.append_transform(MergeTurns())
    rows = rb.sample(3)
    items = list(TorchRLBufferDataset(rb, batch_size=3, keys=[("tokens", "full"), "episode"]))
    assert len(items) >= 3
    stored = {int(row["episode"]): row["tokens", "full"].tolist() for row in rows}
    assert {int(item["episode"]): item["tokens.full"].tolist() for item in items} == stored


@pytest.mark.slow
def test_it_is_a_dataset_of_hugging_face(make):
    pytest.importorskip("datasets")
    rb = buffer(ClipSampler(slice_len=3, layout="clips"), make.vectors([9, 4]))
    items = list(TorchRLBufferDataset(rb, batch_size=12).as_hf_dataset())
    assert [item["action"].shape for item in items] == [(3,)] * 4
