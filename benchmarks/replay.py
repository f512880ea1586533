"""Cost of replay: this project's storage and clips beside TorchRL's, in one process.

Steps have a 17-float observation, a 6-float action, a reward and three done flags; episodes have 50 to
400 steps; a batch is 256 clips of 16 steps. Contenders alternate, and medians are reported. The floor is
one ``index_select`` of known windows per entry of the sample, which every sampler needs. For
conversations, it is the bytes of their tokens, log-probabilities and versions. On a busy machine,
measure with one thread.

    OMP_NUM_THREADS=1 python benchmarks/replay.py
    python benchmarks/replay.py --large --device cuda
    OMP_NUM_THREADS=1 python benchmarks/replay.py --checkpoint
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from replay_checkpoints import checkpoints
from tables import medians
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl import torchrl_logger
from torchrl.data import (
    LazyStackStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from torchrl.envs.transforms import Reward2GoTransform

from torchrl_mt.data import ClipSampler, EpisodeStorage, EpisodeWriter
from torchrl_mt.transforms import DiscountedReturn

CLIPS, SLICE_LEN = 256, 16
BATCH = CLIPS * SLICE_LEN
DONE = ("next", "done")

Buffers = tuple[TensorDictReplayBuffer, TensorDictReplayBuffer]
"""Ours and TorchRL's."""


def episodes(lengths: Tensor, observation: tuple[int, ...] = (17,)) -> TensorDict:
    """Whole episodes in TED, one after the other; image observations are bytes."""
    ends = lengths.cumsum(0) - 1
    steps = int(ends[-1]) + 1
    # Each episode sees one observation more than it has steps.
    of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    rows = torch.arange(steps) + of
    if len(observation) > 1:
        seen = torch.randint(256, (steps + len(lengths), *observation), dtype=torch.uint8)
    else:
        seen = torch.randn(steps + len(lengths), *observation)
    done = torch.zeros(steps, 1, dtype=torch.bool)
    done[ends] = True
    return TensorDict(
        {
            "observation": seen[rows],
            "action": torch.randn(steps, 6),
            "next": {
                "observation": seen[rows + 1],
                "reward": torch.randn(steps, 1),
                "done": done,
                "terminated": done.clone(),
                "truncated": torch.zeros_like(done),
            },
        },
        [steps],
    )


def flags(lengths: Tensor) -> TensorDict:
    """Episodes with end flags only, which is all that choosing clips needs."""
    return episodes(lengths, (1,)).select(DONE)


def chunks(steps: int, shortest: int, longest: int, chunk: int) -> Iterator[Tensor]:
    """Lengths of episodes with at least ``steps`` steps in all, in chunks of about ``chunk`` steps."""
    while steps > 0:
        number = max(1, min(chunk, steps) * 2 // (shortest + longest))
        lengths = torch.randint(shortest, longest + 1, (number,))
        steps -= int(lengths.sum())
        yield lengths


def buffers(max_steps: int, device: str, marks: bool = True) -> Buffers:
    """Both buffers, empty; without ``marks`` the samplers only choose."""
    key = ("next", "truncated") if marks else None
    ours = TensorDictReplayBuffer(
        storage=EpisodeStorage(max_steps, device=device),
        writer=EpisodeWriter(),
        sampler=ClipSampler(slice_len=SLICE_LEN, truncated_key=key),
        batch_size=BATCH,
    )
    theirs = TensorDictReplayBuffer(
        storage=LazyTensorStorage(max_steps, device=device),
        sampler=SliceSampler(
            slice_len=SLICE_LEN, end_key=DONE, cache_values=True, truncated_key=key
        ),
        batch_size=BATCH,
    )
    return ours, theirs


def fill(
    pair: Buffers,
    steps: int,
    make: Callable[[Tensor], TensorDict],
    shortest: int = 50,
    longest: int = 400,
    chunk: int = 100_000,
) -> None:
    """Write the same episodes to both buffers."""
    for lengths in chunks(steps, shortest, longest, chunk):
        data = make(lengths)
        for buffer in pair:
            buffer.extend(data)


def floor(storage: EpisodeStorage, device: str) -> Callable[[], object]:
    """Reads whole windows at random rows from flat columns of as many steps."""
    steps = len(storage)
    first = storage[:1]
    # Ones: memory that is zero need not be there.
    columns = [
        torch.ones(steps, *value.shape[1:], dtype=value.dtype, device=device)
        for value in first.values(True, True)
    ]
    windows = []
    for column in columns:
        width = column[0].numel()
        windows.append(column.as_strided((steps - SLICE_LEN + 1, SLICE_LEN * width), (width, 1)))

    def read() -> list[Tensor]:
        starts = torch.randint(steps - SLICE_LEN + 1, (CLIPS,)).to(device)
        return [window.index_select(0, starts) for window in windows]

    return read


def microseconds(device: str, repeats: int, *contenders: Callable[[], object]) -> list[float]:
    """Median microseconds of each."""
    return [1e6 * seconds for seconds in medians(device, repeats, *contenders)]


def report(name: str, ours: float, theirs: float, least: float | None = None) -> None:
    """One row of the table."""
    row = f"{name:<58}{ours:>12,.0f}{theirs:>14,.0f}{theirs / ours:>9.2f}x"
    print(row if least is None else f"{row}{least:>12,.0f}{ours / least:>9.2f}x", flush=True)


def sampling(pair: Buffers, name: str, device: str, repeats: int) -> None:
    """Sampling while nothing is written."""
    ours, theirs = pair
    read = floor(ours.storage, device)
    report(f"sample, {name}", *microseconds(device, repeats, ours.sample, theirs.sample, read))


def online(pair: Buffers, name: str, device: str, repeats: int) -> None:
    """One episode written, then one sample."""
    episode = episodes(torch.tensor([225]))

    def turn(buffer: TensorDictReplayBuffer) -> None:
        buffer.extend(episode)
        buffer.sample()

    times = microseconds(device, repeats, lambda: turn(pair[0]), lambda: turn(pair[1]))
    report(f"write an episode of 225, then sample, {name}", *times)


def choosing(steps: int, name: str, device: str, repeats: int) -> None:
    """Choosing clips, without reading them."""
    pair = buffers(steps, device, marks=False)
    fill(pair, steps, flags, chunk=1_000_000)
    times = microseconds(
        device, repeats, *(lambda b=b: b.sampler.sample(b.storage, BATCH) for b in pair)
    )
    report(f"choose clips, {name}", *times)


def writing(stored: int, device: str, repeats: int) -> None:
    """Write one episode to a full buffer of short ones."""
    length = 10
    pair = buffers(stored * length, device)
    fill(pair, stored * length, episodes, length, length)
    episode = episodes(torch.tensor([length]))
    times = microseconds(device, repeats, *(lambda b=b: b.extend(episode) for b in pair))
    report(f"write an episode of {length}, {stored:,} stored", *times)


def environments(number: int, steps: int) -> TensorDict:
    """Steps ``[number, steps]`` of environments, which start at random places of an episode."""
    rows = []
    for _ in range(number):
        lengths = torch.randint(50, 401, (2 + steps // 50,))
        data = episodes(lengths)
        data["collector", "traj_ids"] = torch.repeat_interleave(
            torch.randint(1 << 40, (len(lengths),)), lengths
        )
        begin = int(torch.randint(int(lengths[0]), ()))
        rows.append(data[begin : begin + steps])
    return torch.stack(rows).contiguous()


def writing_batches(environments_at_once: int, steps: int, ids: bool, repeats: int) -> None:
    """Write batches of environments; the mean includes batches in which episodes end."""
    number = max(repeats * 10, 500 // steps)
    data = environments(environments_at_once, number * steps)
    if not ids:
        del data["collector"]
    pair = buffers(1_000_000, "cpu")
    batches = [[piece.clone() for piece in data.split(steps, 1)] for _ in pair]
    for buffer, pieces in zip(pair, batches, strict=True):
        buffer.extend(pieces.pop(0))  # allocates
    turns = [iter(pieces) for pieces in batches]
    times = [0.0, 0.0]
    for _ in range(number - 1):
        for i, (buffer, pieces) in enumerate(zip(pair, turns, strict=True)):
            piece = next(pieces)
            begin = time.perf_counter()
            buffer.extend(piece)
            times[i] += 1e6 * (time.perf_counter() - begin) / (number - 1)
    told = "with ids" if ids else "without ids"
    report(f"write [{environments_at_once}, {steps}] steps, {told}", *times)


def pixels(steps: int, device: str, repeats: int) -> None:
    """Images: bytes held, and sampling."""
    pair = buffers(steps, device)
    fill(pair, steps, lambda lengths: episodes(lengths, (64, 64, 3)), chunk=2_000)
    ours, theirs = pair
    held = theirs.storage._storage
    kept = sum(value.numel() * value.element_size() for value in held.values(True, True))
    report(
        f"64x64x3 uint8: bytes per step, {steps:,} steps", ours.storage.nbytes / steps, kept / steps
    )
    sampling(pair, "64x64x3 uint8", device, repeats)


def conversation(turns: int, new: int = 200) -> LazyStackedTensorDict:
    """A conversation; each turn adds ``new // 2`` prompt tokens and as many sampled ones."""
    answer = new // 2
    history = torch.randint(50_000, (turns * new,))
    return lazy_stack(
        [
            TensorDict(
                {
                    "tokens": {
                        "prompt": history[: t * new + new - answer],
                        "response": history[(t + 1) * new - answer : (t + 1) * new - t % 2],
                    },
                    "log_probs": {"response": torch.rand(answer - t % 2)},
                    "versions": {"response": torch.zeros(answer - t % 2, dtype=torch.int64)},
                    "next": {
                        "reward": torch.zeros(1),
                        "done": torch.tensor([t == turns - 1]),
                    },
                }
            )
            for t in range(turns)
        ]
    )


def own_bytes(episode: LazyStackedTensorDict) -> int:
    """Bytes of a conversation's tokens, log-probabilities and versions, each counted once."""
    last = episode[-1]["tokens"]
    tokens = last["prompt"].numel() + last["response"].numel()
    sampled = sum(len(step["tokens", "response"]) for step in episode.unbind(0))
    return 8 * tokens + (4 + 8) * sampled


def stored_bytes(data: TensorDictBase) -> int:
    """Bytes of the tensors of some steps."""
    return sum(
        value.numel() * value.element_size()
        for step in data.unbind(0)
        for value in step.values(True, True)
    )


def conversations(turns: int, device: str, number: int = 32) -> None:
    """Bytes held per conversation."""
    ours = ReplayBuffer(
        storage=EpisodeStorage(turns * number, device=device), writer=EpisodeWriter()
    )
    theirs = ReplayBuffer(storage=LazyStackStorage(turns * number))
    own = 0
    for _ in range(number):
        episode = conversation(turns)
        own += own_bytes(episode)
        ours.extend(episode)
        theirs.extend(episode.clone())
    kept = stored_bytes(theirs[:])
    report(
        f"conversation of {turns} turns of 200 new tokens: bytes",
        *(total / number for total in (ours.storage.nbytes, kept, own)),
    )


def returns(episodes_stored: int, device: str, repeats: int) -> None:
    """Compare discounted returns with a loop over episodes and a loop over steps."""
    lengths = torch.randint(50, 351, (episodes_stored,))
    data = flags(lengths)
    steps = len(data)
    data["next", "reward"] = torch.randn(steps, 1)
    data = data.to(device)
    ours = DiscountedReturn(0.99)
    theirs = Reward2GoTransform(0.99, out_keys=[("next", "return")]).to(device)
    each = list(data.split(lengths.tolist()))

    def of_each_episode() -> None:
        for episode in each:
            theirs.inv(episode)

    def of_each_step() -> None:
        rewards, done = (data["next", key].squeeze(1).tolist() for key in ("reward", "done"))
        result, following = [0.0] * steps, 0.0
        for t in range(steps - 1, -1, -1):
            result[t] = following = rewards[t] + (0.0 if done[t] else 0.99 * following)
        torch.tensor(result, device=device)

    for name, other in (
        ("Reward2GoTransform per episode", of_each_episode),
        ("a Python loop over floats", of_each_step),
    ):
        times = microseconds(device, min(repeats, 5), lambda: ours(data), other)
        report(f"returns of {steps:,} steps; {name}", *times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cpu", help="where steps are stored")
    parser.add_argument("--large", action="store_true", help="1e7 steps too (5 GB of memory)")
    parser.add_argument("--repeats", type=int, default=31, help="turns; the median counts")
    parser.add_argument("--checkpoint", action="store_true", help="saving and loading alone")
    args = parser.parse_args()
    if args.checkpoint:
        return checkpoints(7_500_000)
    device, repeats = args.device, args.repeats

    torchrl_logger.setLevel("WARNING")
    torch.manual_seed(0)
    print(f"device {device}, {torch.get_num_threads()} threads; microseconds but for the bytes")
    print(f"{'':<58}{'torchrl_mt':>12}{'TorchRL':>14}{'ratio':>10}{'floor':>12}{'ratio':>10}")
    for steps, name in ((1_000_000, "1e6 steps"), (10_000_000, "1e7 steps"))[: 1 + args.large]:
        pair = buffers(steps, device)
        fill(pair, steps, episodes)
        sampling(pair, name, device, repeats)
        online(pair, name, device, min(repeats, 11))
        del pair
    sizes = ((10_000, "1e4 steps"), (1_000_000, "1e6 steps"), (10_000_000, "1e7 steps"))
    for steps, name in sizes[: 2 + args.large]:
        choosing(steps, name, device, repeats)
    for stored in (100, 100_000):
        writing(stored, device, repeats)
    for shape in ((1, 1), (16, 1), (64, 1), (256, 1), (16, 16), (64, 16)):
        for ids in (False, True):
            writing_batches(*shape, ids, repeats)
    pixels(20_000, device, min(repeats, 11))
    for turns in (16, 64):
        conversations(turns, device)
    returns(5_000, device, repeats)


if __name__ == "__main__":
    main()
