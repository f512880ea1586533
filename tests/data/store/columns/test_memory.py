import gc
import os
import signal

import pytest
import torch
from torchrl.data import TensorDictReplayBuffer

from tests.buffers import buffer_of
from torchrl_mt.data import ClipSampler, EpisodeStorage


def mapped(folder):
    """The memory of this process that is files in the folder: ranges of addresses."""
    with open("/proc/self/maps") as maps:
        lines = [line for line in maps if str(folder) in line]
    assert all(line.rstrip().endswith("(deleted)") for line in lines)
    edges = [line.split()[0].split("-") for line in lines]
    return [range(int(first, 16), int(last, 16)) for first, last in edges]


def test_values_lie_in_files_and_those_go_with_the_storage(make, tmp_path):
    storage = EpisodeStorage(8, scratch_dir=tmp_path)
    written = make.vectors([2, 3, 4])
    written["image"] = torch.randn(9, 300)  # too large for a record
    for data in make.split(written):
        storage.append(data)
    assert sum(map(len, mapped(tmp_path))) >= storage.nbytes > 0
    assert os.listdir(tmp_path) == []
    sample = storage[:]
    steps = make.steps(sample)
    del storage
    gc.collect()
    assert mapped(tmp_path) == []
    assert make.steps(sample) == steps


def test_forked_processes_that_end_or_are_killed_change_nothing_and_leave_nothing(make, tmp_path):
    storage, data = EpisodeStorage(8, scratch_dir=tmp_path), make.vectors([4])
    storage.append(data)
    for killed in (True, False):
        child = os.fork()
        if not child:
            other = EpisodeStorage(8, scratch_dir=tmp_path)
            other.append(data)
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            del storage, other
            gc.collect()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == (signal.SIGKILL if killed else 0)
        assert os.listdir(tmp_path) == []
    assert make.steps(storage[:]) == make.steps(data)


def test_a_full_disk_is_an_error_that_changes_nothing(make, tmp_path, monkeypatch):
    storage = EpisodeStorage(40, scratch_dir=tmp_path)
    rb = buffer_of(storage, ClipSampler(slice_len=1), cls=TensorDictReplayBuffer, batch_size=4)
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


def test_a_folder_that_cannot_be_written_to_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        EpisodeStorage(8, scratch_dir=tmp_path / "file")
