"""Workers with parts of one batch, one of them without a row, make the gradient of the whole batch."""

import datetime
import multiprocessing

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from torchrl_mt.objectives import MultiTurnLoss
from torchrl_mt.objectives.functional import merge_totals

# Its server imports once, which is most of the time that a process takes, and has no threads.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torchrl_mt.objectives"])


def objective_of(out):
    return sum(value for key, value in out.items() if key.startswith("loss_"))


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def work(rank, store, out, model, mine):
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    parallel, found = DistributedDataParallel(model), []
    for packed in (False, True):
        loss = MultiTurnLoss(parallel, entropy_coef=0.1, packed=packed)
        totals = [None, None]
        distributed.all_gather_object(totals, loss.total(mine))
        rows = loss(mine, total=merge_totals(*totals))
        found.append(gradient(model, 2 * objective_of(rows)))
    torch.save(found, out / f"{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo")
def test_a_worker_without_rows_takes_part(model, rows, tmp_path):
    batch = rows()
    mask = batch["masks", "all_assistant_mask"]
    batch["log_probs", "old"] = batch["log_probs", "full"]
    batch["advantage"] = torch.where(mask, 1.0, 0.0)[..., None]
    parts = [batch, batch[:0]]
    workers = [
        CONTEXT.Process(target=work, args=(rank, tmp_path / "store", tmp_path, model, parts[rank]))
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        worker.kill()
    assert [worker.exitcode for worker in workers] == [0, 0]
    expected = gradient(model, objective_of(MultiTurnLoss(model, entropy_coef=0.1)(batch)))
    assert expected.any()
    for rank in range(2):
        for found in torch.load(tmp_path / f"{rank}.pt"):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
