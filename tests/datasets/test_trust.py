"""Data sets that are damaged, crafted or replaced: an error says so, and nothing outside changes."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path

import h5py
import pytest
import torch

from tests.tiers import few_or_many, first_fast
from torchrl_mt.datasets import DatasetError, EpisodeDataset, open_episodes

from .every_format import ALL, new_path
from .fuzz import COUNT, Fuzzer, read, tree
from .fuzz import write as add_or_replace
from .numbered import check, check_numbered, numbered, write

FOLDERS = ["folder", "arrow", "video", "lance"]
every_format = pytest.mark.parametrize("format", first_fast(ALL, 6))


def made(folder: Path, format: str, count: int = 3) -> Path:
    """A data set of some episodes."""
    return write(new_path(folder, format, "a"), format, range(count))


def rename_data(path: Path, format: str, name: str) -> None:
    """Have the header name another folder, as a crafted one does: its checksum is right."""
    if format == "lance":
        import lance

        data = lance.dataset(path)
        header = json.loads(data.schema.metadata[b"torchrl_mt"])
    else:
        header = json.loads((path / "DATASET").read_text())
    header["data"] = name
    header.pop("crc32", None)
    header["crc32"] = zlib.crc32(json.dumps(header).encode())
    if format == "lance":
        schema = data.schema.with_metadata({b"torchrl_mt": json.dumps(header).encode()})
        fragments = [fragment.metadata for fragment in data.get_fragments()]
        operation = lance.LanceOperation.Overwrite(schema, fragments)
        lance.LanceDataset.commit(str(path), operation)
    else:
        (path / "DATASET").write_text(json.dumps(header))


# ---- names and links --------------------------------------------------------------------------------


NAMES = ["../home", "ABSOLUTE", ".", "", "data-raw", "data-0123456789ab/.."]


@pytest.mark.parametrize("format", FOLDERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_header_that_names_another_folder_is_refused(format, name, tmp_path):
    path, home = made(tmp_path / "sets", format), tmp_path / "sets" / "home"
    home.mkdir()
    (home / "episodes.index").write_text("mine")
    (path / "data-raw").mkdir()
    rename_data(path, format, str(home) if name == "ABSOLUTE" else name)
    before = tree(tmp_path / "sets" / "home")
    with pytest.raises(DatasetError, match="must name a folder like data-0123456789ab"):
        EpisodeDataset(path)
    for mode in ("append", "overwrite"):
        with pytest.raises(DatasetError, match="must name a folder"):
            write(path, format, [1], mode)
    assert tree(home) == before
    assert (path / "data-raw").is_dir()


@pytest.mark.parametrize("format", FOLDERS)
@pytest.mark.parametrize("mode", ["append", "overwrite"])
def test_only_what_a_writer_has_made_is_removed(format, mode, tmp_path):
    path = made(tmp_path, format)
    kept = ["data-raw/mine", "data-0123456789ab/mine", "notes"]
    kept += [str(each.relative_to(path) / "mine") for each in path.glob("data-*")]
    for name in kept:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(name)
    left = path / "data-ba9876543210"
    left.mkdir()
    (left / "episodes.index").touch()
    write(path, format, [3], mode)
    check(path, range(4) if mode == "append" else [3])
    assert [name for name in kept if (path / name).read_text() != name] == []
    assert not left.exists()


def test_a_data_set_with_files_of_others_is_not_replaced_by_another_format(tmp_path):
    path = made(tmp_path, "folder")
    for name in ("notes", "data-raw", str(next(path.glob("data-*")).relative_to(path) / "mine")):
        (path / name).touch()
        with pytest.raises(DatasetError, match=f"would delete '{name}'"):
            open_episodes(path, format="jsonl", mode="overwrite")
        (path / name).unlink()
    check(write(path, "jsonl", [3], "overwrite"), [3])


@pytest.mark.parametrize("format", FOLDERS)
def test_links_to_the_outside_are_neither_read_nor_written_through(format, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("episodes.index", "episodes.metadata", "x"):
        (outside / name).write_bytes(b"mine" * 20)
    before, count = tree(outside), 0
    whole = made(tmp_path, format, COUNT)
    for each in sorted(whole.rglob("*")):
        path = shutil.copytree(whole, tmp_path / f"linked-{count}")
        linked, count = path / each.relative_to(whole), count + 1
        target = outside if linked.is_dir() else outside / "x"
        shutil.rmtree(linked) if linked.is_dir() else linked.unlink()
        linked.symlink_to(target)
        # Lance's log of transactions is not read.
        assert read(path, format, prefix=False) != "as written" or format == "lance"
        for mode in ("append", "overwrite"):
            add_or_replace(path, format, mode)
        assert tree(outside) == before
    assert count > 3


def test_links_of_the_hub_are_followed(tmp_path):
    whole = made(tmp_path, "folder")
    snapshot = tmp_path / "datasets--me--walks" / "snapshots" / "0f3a"
    snapshot.parent.mkdir(parents=True)
    os.rename(whole, snapshot)
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir()
    for i, file in enumerate([each for each in snapshot.rglob("*") if each.is_file()]):
        os.rename(file, blobs / str(i))
        file.symlink_to(os.path.relpath(blobs / str(i), file.parent))
    before = tree(blobs)
    check(snapshot, range(3))
    with pytest.raises(ValueError, match="is a link"):
        open_episodes(snapshot, mode="append")
    assert tree(blobs) == before


@pytest.mark.parametrize("how", ["external", "soft", "virtual", "raw"])
def test_hdf5_files_that_lead_elsewhere_are_refused(how, tmp_path):
    path, other = made(tmp_path, "hdf5"), tmp_path / "other.h5"
    with h5py.File(path, "r+") as file, h5py.File(other, "w") as others:
        values = others["observation"] = file["observation"][:]
        del file["observation"]
        if how == "external":
            file["observation"] = h5py.ExternalLink(str(other), "observation")
        elif how == "soft":
            file["copy"], file["observation"] = values, h5py.SoftLink("/copy")
        elif how == "virtual":
            layout = h5py.VirtualLayout(values.shape, values.dtype)
            layout[:] = h5py.VirtualSource(str(other), "observation", values.shape)
            file.create_virtual_dataset("observation", layout)
        else:
            (tmp_path / "raw").write_bytes(values.tobytes())
            external = [(str(tmp_path / "raw"), 0, values.nbytes)]
            file.create_dataset("observation", values.shape, values.dtype, external=external)
    for attempt in (lambda: EpisodeDataset(path), lambda: open_episodes(path, mode="append")):
        with pytest.raises(DatasetError, match=r"observation.* of .*a\.h5"):
            attempt()


# ---- damage -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@few_or_many(60, 300)
def test_whatever_is_damaged_is_an_error_or_the_right_data(examples, tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    fuzzer = Fuzzer(tmp_path, [*ALL[:3], *ALL[4:]] if examples < 100 else ALL)
    for seed in range(examples):
        fuzzer.try_one(seed)
    assert len({result for _, result in fuzzer.counts}) > 4


@pytest.mark.parametrize("format", ["hdf5", *FOLDERS])
def test_a_cut_list_hides_no_episodes(format, tmp_path):
    path = made(tmp_path, format)
    if format == "hdf5":
        with h5py.File(path, "r+") as file:
            file["ep_len"][2] = 0
    else:
        (index,) = path.glob("data-*/episodes.index")
        os.truncate(index, index.stat().st_size // 3 * 2)
    with pytest.raises(DatasetError, match=r"a(\.h5|\.lance)?\b.*(damaged|has \d+ )"):
        EpisodeDataset(path)


@every_format
def test_data_sets_without_checksums_are_read_and_appended_to(format, tmp_path):
    with tarfile.open(Path(__file__).parent / "version_1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    (path,) = (each for each in tmp_path.iterdir() if EpisodeDataset(each).format == format)
    with open_episodes(path, mode="append") as out:
        out.write_episode(numbered(4, has_image=format in ("folder", "video")), {"number": 4})
    dataset = EpisodeDataset(path)
    assert [dataset.metadata(i)["number"] for i in range(len(dataset))] == [1, 2, 3, 4]
    for i in range(4):
        got, expected = dataset.episode(i), numbered(i + 1)
        assert torch.equal(got["observation"], expected["observation"])
        assert list(got["text"]) == list(expected["text"])


# ---- writers that fail, and readers of what is replaced -----------------------------------------------


@pytest.mark.parametrize("format", ALL)
def test_a_reader_of_what_is_overwritten_never_mixes_it(format, tmp_path):
    path = made(tmp_path, format, 4)
    dataset, later = EpisodeDataset(path), EpisodeDataset(path)
    write(path, format, (5, 6, 7, 8), "overwrite")
    replaced = 0
    for _ in range(2):
        for i in (2, 0, 1, 3):
            try:
                assert dataset.metadata(i) == {"number": i}
                check_numbered(dataset.episode(i), i, format)
            except DatasetError as error:
                assert "was replaced since it was opened" in str(error)  # noqa: PT017
                replaced += 1
    assert replaced in (0, 8)
    later.close()  # Another process opens it for itself in the same way.
    with pytest.raises(DatasetError, match="was replaced since it was opened"):
        later.episode(2)


LIMITED = """
import resource, signal, sys, torch
from torchrl_mt.datasets import open_episodes
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
episode = lambda n: {"x": torch.full((50, 8), n)}
for path in sys.argv[1:]:
    with open_episodes(path) as out:
        number = 0
        try:
            while True:
                out.write_episode(episode(number), {"number": number})
                number += 1
        except (OSError, RuntimeError):  # The second one is h5py's.
            print(number)
        if path == sys.argv[-1]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            out.write_episode(episode(number), {"number": number})
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="no limits on the sizes of files")
@pytest.mark.parametrize("format", ["hdf5", "jsonl"])
def test_a_full_disk_leaves_what_was_written(format, tmp_path):
    """A writer is closed then, or goes on when there is space again."""
    closed, going_on = (new_path(tmp_path, format, name) for name in ("closed", "going on"))
    command = [sys.executable, "-c", LIMITED, str(closed), str(going_on)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    written = [int(number) for number in said.stdout.split()]
    for path, count in ((closed, written[0]), (going_on, written[1] + 1)):
        dataset = EpisodeDataset(path)
        assert len(dataset) == count > 3
        for i, episode in enumerate(dataset.episodes()):
            assert episode["x"].unique().tolist() == [i]
        with open_episodes(path, mode="append") as out:
            out.write_episode({"x": torch.full((50, 8), 3)})
        assert len(EpisodeDataset(path)) == count + 1
