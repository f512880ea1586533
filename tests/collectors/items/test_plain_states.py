"""The state of a collector holds no class of the package, whatever its data is."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from tests.collectors.chats import Chat
from tests.collectors.runs import collecting
from torchrl_mt.collectors import SuccessRateCurriculum, WeightedCurriculum

ITEMS = [{"turns": k % 3 + 1} for k in range(6)]


def loader():
    generator = torch.Generator().manual_seed(0)
    return DataLoader(ITEMS, batch_size=2, shuffle=True, generator=generator, collate_fn=list)


DATA = {
    "none": lambda: None,
    "list": lambda: ITEMS,
    "generator": lambda: (item for item in ITEMS),
    "loader": loader,
    "success": lambda: SuccessRateCurriculum(ITEMS),
    "weights": lambda: WeightedCurriculum(ITEMS),
}


@pytest.mark.parametrize("data", DATA)
def test_a_collectors_state_is_plain(engine, data, tmp_path):
    with collecting(Chat, engine, DATA[data](), n=2) as collector:
        stream = iter(collector)
        next(stream)
        torch.save(collector.state_dict(), tmp_path / "state.pt")
        expected = next(stream)["data"]
    with collecting(Chat, engine, DATA[data](), n=2) as collector:
        collector.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert next(iter(collector))["data"] == expected
