"""Images of one entry of one episode as the frames of an MP4 file (H.264).

Frame ``i`` that is read alone is bit for bit frame ``i`` of the whole file that is decoded from its
beginning. At ``crf=0`` it is also bit for bit the image that was written; else it is close to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import chain
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from torchrl_mt.checks import import_extra
from torchrl_mt.datasets.format_parts import errors_named

__all__ = ["read_frames", "write_frames"]

_KEY_FRAMES = 16
"""Most frames from one key frame to the next: what a read may have to decode before its first frame."""
_FULL_RANGE = 2
_BT601 = 5
"""ffmpeg's numbers: all 256 levels are used, and what the YUV values mean."""


def write_frames(file: FilePath, frames: Iterable[np.ndarray], *, fps: int, crf: int) -> None:
    """Write an MP4 file.

    RGB frames are stored as YUV 4:2:0, which every player knows; this takes even sides, so the last
    column or row may be there twice. At ``crf=0`` they are stored as RGB.

    Args:
        file: a file that does not exist.
        frames: ``uint8`` arrays ``[H, W]`` (gray) or ``[H, W, 3]`` (RGB), all of one shape.
        fps: frames per second.
        crf: 0 (lossless) to 51, x264's constant rate factor.
    """
    av = import_extra("av", "video")
    frames = iter(frames)
    first = next(frames)
    given = "gray" if first.ndim == 2 else "rgb24"
    codec, stored = "libx264", "gray"
    if first.ndim == 3:
        codec, stored = ("libx264", "yuv420p") if crf else ("libx264rgb", "rgb24")
    is_padded = stored == "yuv420p"
    height, width = first.shape[:2]
    convert = av.video.reformatter.VideoReformatter()
    with av.open(str(file), "w", format="mp4") as container:
        options = {"crf": str(crf), "g": str(_KEY_FRAMES)}
        stream = container.add_stream(codec, rate=fps, options=options)
        stream.width, stream.height = width + is_padded * width % 2, height + is_padded * height % 2
        stream.pix_fmt = stored
        colors = {}
        if stored != "rgb24":
            stream.codec_context.color_range = _FULL_RANGE
            stream.codec_context.colorspace = _BT601
            colors = {"dst_color_range": _FULL_RANGE, "dst_colorspace": _BT601}
        for number, image in enumerate(chain([first], frames)):
            if is_padded:
                pads = [(0, height % 2), (0, width % 2), (0, 0)]
                image = np.pad(image, pads, mode="edge")
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format=given)
            if stored != given:
                frame = convert.reformat(frame, format=stored, **colors)
            frame.pts, frame.time_base = number, Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def read_frames(
    file: FilePath, numbers: Iterable[int], shape: tuple[int, ...], *, fps: int
) -> Iterator[np.ndarray]:
    """Read frames, decoding from the key frame before each run of them.

    Args:
        file: what :func:`write_frames` wrote.
        numbers: of the frames, in order.
        shape: ``[H, W]`` (gray) or ``[H, W, 3]`` (RGB), what was written.
        fps: frames per second.

    Raises:
        DatasetError: if one cannot be read; names the file.
    """
    av = import_extra("av", "video")
    height, width = shape[:2]
    format = "gray" if len(shape) == 2 else "rgb24"
    convert = av.video.reformatter.VideoReformatter()
    with errors_named(file), av.open(str(file)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        stream.codec_context.options = {"err_detect": "explode"}
        tick = 1 / (stream.time_base * fps)
        frames: Iterator[Any] = iter(())
        before = -_KEY_FRAMES
        for number in numbers:
            if number - before >= _KEY_FRAMES:
                container.seek(round(number * tick), stream=stream)
                frames = container.decode(stream)
            frame = next((each for each in frames if each.pts >= number * tick), None)
            if frame is None or frame.pts != round(number * tick):
                raise ValueError(f"it has no frame {number}")
            array = convert.reformat(frame, format=format).to_ndarray()
            if array.shape[:2] not in (shape[:2], (height + height % 2, width + width % 2)):
                raise ValueError(f"its frames are {array.shape}, expected {shape}")
            yield array[:height, :width]
            before = number
