"""The format ``"video"``: the format ``"folder"``, with images as MP4 files.

An image entry of an episode is one file, ``NAME.mp4``, with a frame per row. It is lossy: images that
are read are close to those that were written, and equal only if ``crf`` is 0. Everything else is as in
``"folder"``, and equal bit for bit.
"""

from __future__ import annotations

import logging
from pathlib import Path as FilePath

import numpy as np
import torch

from torchrl_mt.bridges.video.mp4_files import read_frames, write_frames
from torchrl_mt.checks import check_integer_within, import_extra
from torchrl_mt.datasets.format_parts import (
    DenseRows,
    EncodedEpisode,
    EntryFiles,
    Field,
    FolderReader,
    FolderWriter,
    Format,
    Mode,
    StoredRows,
    channels_of,
    format_in,
    from_picture,
    is_image,
    name_of,
    to_picture,
    with_suffix,
)

__all__ = ["FORMAT", "VideoReader", "VideoWriter"]

_logger = logging.getLogger("torchrl_mt")

_LONGEST_SIDE = 8192
"""Pixels: what decoders take."""


class VideoReader(FolderReader):
    """Reads a data set whose images are MP4 files.

    Args:
        path: its folder.

    Raises:
        DatasetError: if it cannot be read; names the file.
    """

    def read_entry(self, entry: EntryFiles, field: Field, rows: np.ndarray) -> StoredRows:
        """Read rows of one entry."""
        if not _is_video(field):
            return super().read_entry(entry, field, rows)
        values = np.empty((len(rows), *field.shape), dtype=np.uint8)
        picture = to_picture(np.empty(field.shape, dtype=np.uint8)).shape
        file = entry.mapped(".mp4")
        frames = read_frames(file, rows.tolist(), picture, fps=self.options["fps"])
        for place, frame in enumerate(frames):
            values[place] = from_picture(frame, field.shape)
        return DenseRows(values)


class VideoWriter(FolderWriter):
    """Writes a data set whose images are MP4 files (H.264).

    Images are ``uint8`` entries of a fixed shape ``[H, W]``, ``[H, W, C]`` or ``[C, H, W]`` with one
    channel or three. Video is lossy. Images with four channels or of varying shapes are PNG files, and
    other dtypes are stored bit for bit: give what is no picture, such as a map of labels, another dtype
    than ``uint8``.

    Args:
        path: its folder.
        mode: see :func:`~torchrl_mt.datasets.open_episodes`.
        crf: x264's constant rate factor: 0 is lossless, and as large as that is; from 1 to 51 files get
            smaller and images worse. Default: 23.
        fps: frames per second, at which players show the files. Default: 30.

    With ``"append"``, both are what the data set has.

    Raises:
        ValueError: if an option is out of range, or not that of the data set to append to.
        ImportError: if PyAV is not installed; names the extra.
    """

    def __init__(
        self, path: FilePath, mode: Mode, *, crf: int | None = None, fps: int | None = None
    ) -> None:
        super(FolderWriter, self).__init__(path, mode)
        import_extra("av", "video")
        if crf is not None:
            check_integer_within("crf", crf, 0, 51)
        if fps is not None:
            check_integer_within("fps", fps, 1, 1000)
        self.open("video", {"crf": crf, "fps": fps}, {"crf": 23, "fps": 30})

    def write(self, episode: EncodedEpisode) -> None:
        """Write an episode; with the first one, say what is lossy."""
        fields = episode.schema.fields
        videos = [name_of(path) for path in episode.columns if _is_video(fields[path])]
        is_first = self.schema is None
        super().write(episode)
        if is_first and videos and self.options["crf"]:
            _logger.warning(
                "%s: %s are written as video, which is lossy: they are read close to what they were, "
                "not equal. Give crf=0 for lossless video, or format='folder'.",
                self.path,
                ", ".join(videos),
            )

    def write_entry(self, base: FilePath, field: Field, stored: StoredRows) -> None:
        """Write all rows of one entry; ``base`` is its path without a suffix."""
        if not isinstance(stored, DenseRows) or not _is_video(field):
            super().write_entry(base, field, stored)
            return
        frames = map(to_picture, stored.values)
        write_frames(with_suffix(base, "mp4"), frames, **self.options)


def _is_video(field: Field) -> bool:
    """Whether an entry is written as video."""
    return (
        field.kind == "dense"
        and field.dtype is torch.uint8
        and is_image(field.shape)
        and channels_of(field.shape) in (1, 3)
        and max(field.shape) <= _LONGEST_SIDE
    )


FORMAT = Format("video", VideoReader, VideoWriter, lambda path: format_in(path) == "video")
