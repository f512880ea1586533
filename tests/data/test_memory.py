import gc
import os
import pickle

import pytest
import torch
from torchrl.data import TensorDictReplayBuffer

from torchrl_mt.data import ClipSampler, EpisodeStorage, EpisodeWriter
from torchrl_mt.data.memory import Memory


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", ["vectors", "turns"])
def test_mapped_steps_are_those_held_in_memory(make, kind, tmp_path):
    plain, mapped = EpisodeStorage(12), EpisodeStorage(12, scratch_dir=tmp_path / "new")
    lengths = [3, 4, 2, 12, 1, 5, 9, 11, 2, 2]
    for i, data in enumerate(make.split(getattr(make, kind)(lengths))):
        for storage in (plain, mapped):
            storage.append(data)
        assert make.steps(mapped[:]) == make.steps(plain[:]), i
    assert files(tmp_path)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= mapped.nbytes


def test_values_lie_in_the_files(make, tmp_path):
    storage = EpisodeStorage(8, scratch_dir=tmp_path)
    data = make.vectors([8])
    data["action"][:] = 0x01020304
    storage.append(data)
    wanted = bytes([4, 3, 2, 1]) * 8
    assert any(wanted in path.read_bytes() for path in files(tmp_path))


def test_files_go_with_the_storage(make, tmp_path):
    storage = EpisodeStorage(8, scratch_dir=tmp_path)
    for data in make.split(make.turns([2, 3, 4])):
        storage.append(data)
    sample = storage[:]
    steps = make.steps(sample)
    del storage
    gc.collect()
    assert os.listdir(tmp_path) == []
    assert make.steps(sample) == steps


def test_storages_share_a_folder(make, tmp_path):
    storages = [EpisodeStorage(8, scratch_dir=tmp_path) for _ in range(2)]
    written = [make.vectors([4], seed=seed) for seed in range(2)]
    for storage, data in zip(storages, written, strict=True):
        storage.append(data)
    for storage, data in zip(storages, written, strict=True):
        assert make.steps(storage[:]) == make.steps(data)


def test_a_copy_has_files_of_its_own(make, tmp_path):
    storage = EpisodeStorage(8, scratch_dir=tmp_path)
    storage.append(make.vectors([4]))
    steps = make.steps(storage[:])
    copy = pickle.loads(pickle.dumps(storage))
    copy.append(make.vectors([5], seed=1))
    assert make.steps(storage[:]) == steps
    assert len(os.listdir(tmp_path)) == 2


def test_a_forked_process_leaves_the_files(tmp_path):
    memory = Memory(torch.device("cpu"), tmp_path)
    data = memory.empty((5,), torch.int64)
    child = os.fork()
    if not child:
        del data, memory
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(files(tmp_path)) == 1


def test_a_full_disk_is_an_error_that_changes_nothing(make, tmp_path, monkeypatch):
    storage = EpisodeStorage(40, scratch_dir=tmp_path)
    rb = TensorDictReplayBuffer(
        storage=storage, writer=EpisodeWriter(), sampler=ClipSampler(slice_len=1), batch_size=4
    )
    room, reserve = [3], os.posix_fallocate

    def reserved(*args):
        room[0] -= 1
        if room[0] < 0:
            raise OSError(28, "No space left on device")
        reserve(*args)

    monkeypatch.setattr(os, "posix_fallocate", reserved)
    with pytest.raises(OSError, match="No space left"):
        rb.extend(make.vectors([3]))
    assert len(storage) == 0
    assert storage.schema is None
    room[0] = 99
    # Episodes of one step need a row more each than the ring was made for: it has to grow.
    written = make.vectors([3] + [1] * 20)
    rb.extend(written)
    stored = make.steps(storage[:])
    room[0] = 2
    with pytest.raises(OSError, match="No space left"):
        rb.extend(make.vectors([1] * 16, first_id=50))
    assert make.steps(storage[:]) == stored
    room[0] = 99
    more = make.vectors([1] * 16, first_id=50)
    rb.extend(more)
    assert make.steps(storage[:]) == stored + make.steps(more)


def test_files_are_for_the_cpu(tmp_path):
    with pytest.raises(ValueError, match=r"scratch_dir .* use device='cpu', got 'meta'"):
        EpisodeStorage(8, device="meta", scratch_dir=tmp_path)
