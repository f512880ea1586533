"""A small data set in LeRobot's layout v3.0, written with pyarrow and PyAV."""

from __future__ import annotations

import io
import json
from fractions import Fraction

import av
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

FPS = 10
SIZE = (32, 48)


def feature(dtype, *shape, names=None):
    return {"dtype": dtype, "shape": list(shape), "names": names}


FEATURES = {
    "observation.state": feature("float32", 3, names=["x", "y", "z"]),
    "observation.map": feature("float64", 2, 2),
    "observation.images.top": feature("video", *SIZE, 3, names=["height", "width", "channels"]),
    "observation.images.wrist": feature("image", 3, *SIZE, names=["channels", "height", "width"]),
    "action": feature("float32", 2, names=["left", "right"]),
    "note": feature("string", 1),
    "next.reward": feature("float32", 1),
    "next.done": feature("bool", 1),
    "timestamp": feature("float32", 1),
    "frame_index": feature("int64", 1),
    "episode_index": feature("int64", 1),
    "index": feature("int64", 1),
    "task_index": feature("int64", 1),
}
TASKS = ["push the block", "lift it"]


def level(episode, frame):
    """The brightness of a video's frame, which tells it from all others near it."""
    return (40 * episode + 20 * frame) % 200 + 20


def random_frames(lengths, seed=0, width=3):
    """What the frames of each episode hold, by feature; images are ``[T, H, W, 3]``."""
    rng = np.random.default_rng(seed)
    episodes = []
    for i, T in enumerate(lengths):
        first = sum(lengths[:i])
        video = np.stack([np.full((*SIZE, 3), level(i, t), dtype=np.uint8) for t in range(T)])
        episodes.append(
            {
                "observation.state": rng.standard_normal((T, width)).astype(np.float32),
                "observation.map": rng.standard_normal((T, 2, 2)),
                "observation.images.top": video,
                "observation.images.wrist": rng.integers(0, 256, (T, *SIZE, 3), dtype=np.uint8),
                "action": rng.standard_normal((T, 2)).astype(np.float32),
                "note": [f"{i}:{t}" for t in range(T)],
                "next.reward": rng.standard_normal(T).astype(np.float32),
                "next.done": (np.arange(T) == T - 1) & (i % 2 == 0),
                "timestamp": np.arange(T, dtype=np.float32) / FPS,
                "frame_index": np.arange(T),
                "episode_index": np.full(T, i),
                "index": first + np.arange(T),
                "task_index": np.full(T, i % 2),
            }
        )
    return episodes


def write_folder(root, lengths, *, files=(0, 0, 1), features=None, one_row_group=False, seed=0):
    """Write a data set; episode ``i`` goes to the files number ``files[i]``. Return its frames."""
    features = features or FEATURES
    width = features.get("observation.state", {"shape": [3]})["shape"][0]
    episodes = random_frames(lengths, seed, width)
    videos = [name for name in features if features[name]["dtype"] == "video"]
    stored = [name for name in features if name not in videos]
    rows = []
    for number in sorted(set(files)):
        mine = [i for i in range(len(lengths)) if files[i] == number]
        tables = [_table(episodes[i], stored, features) for i in mine]
        path = root / "data" / "chunk-000" / f"file-{number:03d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(path, tables[0].schema) as writer:
            for table in [pa.concat_tables(tables)] if one_row_group else tables:
                writer.write_table(table)
        at = 0.0
        for i in mine:
            first = sum(lengths[:i])
            row = {
                "episode_index": i,
                "tasks": [TASKS[i % 2]],
                "length": lengths[i],
                "data/chunk_index": 0,
                "data/file_index": number,
                "dataset_from_index": first,
                "dataset_to_index": first + lengths[i],
                "stats/action/mean": [0.0, 0.0],
                "meta/episodes/chunk_index": 0,
            }
            for name in videos:
                row |= {
                    f"videos/{name}/chunk_index": 0,
                    f"videos/{name}/file_index": number,
                    f"videos/{name}/from_timestamp": at,
                    f"videos/{name}/to_timestamp": at + lengths[i] / FPS,
                }
            at += lengths[i] / FPS
            rows.append(row)
        for name in videos:
            file = root / "videos" / name / "chunk-000" / f"file-{number:03d}.mp4"
            _write_video(file, np.concatenate([episodes[i][name] for i in mine]))
    meta = root / "meta"
    (meta / "episodes" / "chunk-000").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), meta / "episodes" / "chunk-000" / "file-000.parquet")
    pandas.DataFrame({"task_index": [0, 1]}, index=TASKS).to_parquet(meta / "tasks.parquet")
    info = {
        "codebase_version": "v3.0",
        "robot_type": "none",
        "fps": FPS,
        "total_episodes": len(lengths),
        "total_frames": sum(lengths),
        "total_tasks": 2,
        "features": features,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    }
    (meta / "info.json").write_text(json.dumps(info))
    return episodes


def _table(frames, names, features):
    arrays = {}
    for name in names:
        values, shape = frames[name], features[name]["shape"]
        if features[name]["dtype"] == "image":
            arrays[name] = [{"bytes": _png(image), "path": None} for image in values]
        elif len(shape) == 1 and shape != [1]:
            flat = pa.array(values.reshape(-1))
            arrays[name] = pa.FixedSizeListArray.from_arrays(flat, shape[0])
        else:
            arrays[name] = pa.array(values.tolist() if len(shape) > 1 else values)
    return pa.table(arrays)


def _png(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def _write_video(path, frames):
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"g": "2", "crf": "10"})
        stream.height, stream.width = SIZE
        stream.pix_fmt = "yuv420p"
        for number, frame in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts, picture.time_base = number, Fraction(1, FPS)
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
