"""What a folder's files name lies in it."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from tensordict import TensorDict

from torchrl_mt.data import EpisodeStorage
from torchrl_mt.data._store.files.manifest import HASHES, read_manifest, write_manifest
from torchrl_mt.paths import inside


def test_names_and_links_that_lead_out_are_refused(tmp_path):
    folder, outside = tmp_path / "set", tmp_path / "outside"
    (folder / "deep").mkdir(parents=True)
    outside.mkdir()
    for file in (folder / "deep" / "x", outside / "x"):
        file.touch()
    (folder / "in").symlink_to("deep/x")
    (folder / "out").symlink_to("../outside")
    (folder / "gone").symlink_to(outside / "nothing")
    os.mkfifo(folder / "pipe")
    for name in ("deep/x", "deep", "in", "new/file"):
        assert inside(folder, name) == folder / name
    names = ["", "..", "../outside", "deep/../../outside/x", "out/x", "gone", "a\0"]
    for name in [*names, str(outside)]:
        with pytest.raises(ValueError, match=r"lies outside|is a link out of its folder"):
            inside(folder, name)
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        inside(folder, "pipe")
    with pytest.raises(ValueError, match="is a link, which is not followed"):
        inside(folder, "in", to_write=True)
    (tmp_path / "link").symlink_to(folder)
    assert inside(tmp_path / "link", "deep/x") == tmp_path / "link" / "deep" / "x"


@pytest.mark.parametrize("how", ["name", "file", "version"])
def test_a_checkpoint_that_leads_out_of_its_folder_is_refused(how, tmp_path):
    storage = EpisodeStorage(10)
    storage.append(TensorDict({"action": torch.arange(3)}, [3]))
    storage.dumps(tmp_path / "saved")
    (version,) = (tmp_path / "saved").glob("checkpoint-*")
    (manifest,) = version.rglob(HASHES)
    files = read_manifest(manifest)
    name = next(name for name in files if name.endswith(".rows"))
    (tmp_path / "outside").mkdir()
    shutil.copy(manifest.parent / name, tmp_path / "outside" / "x")
    if how == "name":
        files[str(tmp_path / "outside" / "x")] = files[name]
        write_manifest(manifest, files)
    elif how == "file":
        (manifest.parent / name).unlink()
        (manifest.parent / name).symlink_to(tmp_path / "outside" / "x")
    else:
        os.rename(version, tmp_path / "outside" / "version")
        version.symlink_to(tmp_path / "outside" / "version")
    with pytest.raises(ValueError, match=r"lies outside|link out of its folder|damaged"):
        EpisodeStorage(10).loads(tmp_path / "saved")
