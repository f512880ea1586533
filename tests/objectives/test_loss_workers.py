"""Workers with parts of one batch, one of them without a row, make the gradient of the whole batch."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from torchrl_mt.objectives import MultiTurnLoss
from torchrl_mt.objectives.functional import merge_totals


def objective_of(out):
    return sum(value for key, value in out.items() if key.startswith("loss_"))


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def work(rank, folder):
    torch.set_num_threads(1)
    model, parts = torch.load(folder / "given.pt", weights_only=False)
    mine = parts[rank]
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
    )
    parallel, found = DistributedDataParallel(model), []
    for packed in (False, True):
        loss = MultiTurnLoss(parallel, entropy_coef=0.1, packed=packed)
        totals = [None, None]
        distributed.all_gather_object(totals, loss.total(mine))
        rows = loss(mine, total=merge_totals(*totals))
        found.append(gradient(model, 2 * objective_of(rows)))
    torch.save(found, folder / f"{rank}.part")
    (folder / f"{rank}.part").rename(folder / f"{rank}.pt")
    # Whoever leaves first may take from the other what it still reads, so neither leaves by itself.
    threading.Event().wait()


@pytest.mark.slow
@pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo")
def test_a_worker_without_rows_takes_part(model, rows, tmp_path):
    batch = rows()
    mask = batch["masks", "all_assistant_mask"]
    batch["log_probs", "old"] = batch["log_probs", "full"]
    batch["advantage"] = torch.where(mask, 1.0, 0.0)[..., None]
    torch.save((model, [batch, batch[:0]]), tmp_path / "given.pt")
    workers = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path)]) for rank in range(2)
    ]
    found = [tmp_path / f"{rank}.pt" for rank in range(2)]
    try:
        while not all(path.exists() for path in found):
            assert [worker.poll() for worker in workers] == [None, None]
            time.sleep(0.05)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    expected = gradient(model, objective_of(MultiTurnLoss(model, entropy_coef=0.1)(batch)))
    assert expected.any()
    for path in found:
        for summed in torch.load(path):
            torch.testing.assert_close(summed, expected, atol=1e-5, rtol=1e-4)


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]))
