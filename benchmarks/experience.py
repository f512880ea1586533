"""Cost of training on rows: estimators, forward passes and memory.

Estimators run on 512 rows of 4,096 tokens, in which stretches of 64 to 128 sampled tokens alternate with
stretches of the environment's. *Floor* is the time to copy as many bytes as an estimator must read and
write; *compiled* uses ``torch.compile``. Forward and backward passes are of a small Qwen2. Contenders
alternate, and medians are reported. On a busy machine, measure with one thread.

    OMP_NUM_THREADS=1 python benchmarks/experience.py --compiled
    python benchmarks/experience.py --device cuda --dtype bfloat16 --width 896 --layers 24
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import torch
from tables import Part, Row, medians, show
from torch import Tensor, nn
from torchrl.objectives.value.functional import vec_generalized_advantage_estimate
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_mt.objectives import Passes, row_log_probs
from torchrl_mt.objectives import functional as F
from torchrl_mt.objectives.functional.kl import KLKind

ROWS, TOKENS, TURN = 512, 4096, 64
GAMMA, LMBDA = 0.99, 0.95
GROUP = 8
"""Rows that share a prompt."""


# Estimators


def turns_of_tokens(device: str) -> tuple[Tensor, Tensor]:
    """Mask of sampled tokens, and the turn of each token; rows are padded on the right."""
    ends = torch.randint(TURN, 2 * TURN, (ROWS, TOKENS // TURN)).cumsum(-1)
    stretch = torch.searchsorted(ends, torch.arange(TOKENS).repeat(ROWS, 1), right=True)
    here = torch.arange(TOKENS) < torch.randint(TOKENS // 2, TOKENS + 1, (ROWS, 1))
    turns = torch.where(here, stretch // 2, -1)
    return ((stretch % 2 == 1) & here).to(device), turns.to(device)


def gae_by_position(reward: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Masked GAE as a loop over positions, for all rows at once."""
    advantage = torch.zeros_like(reward)
    following = torch.zeros(len(reward), device=reward.device)
    next_value = torch.zeros_like(following)
    for t in range(reward.shape[1] - 1, -1, -1):
        here = mask[:, t]
        delta = reward[:, t] + GAMMA * next_value - value[:, t]
        following = torch.where(here, delta + GAMMA * LMBDA * following, following)
        next_value = torch.where(here, value[:, t], next_value)
        advantage[:, t] = torch.where(here, following, 0.0)
    return advantage


def gae_by_token(reward: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Masked GAE as a loop over tokens in plain Python."""
    rows = []
    for rewards, values, sampled in zip(*(x.tolist() for x in (reward, value, mask)), strict=True):
        out, following, next_value = [0.0] * len(rewards), 0.0, 0.0
        for t in range(len(rewards) - 1, -1, -1):
            if sampled[t]:
                delta = rewards[t] + GAMMA * next_value - values[t]
                out[t] = following = delta + GAMMA * LMBDA * following
                next_value = values[t]
        rows.append(out)
    return torch.tensor(rows, device=reward.device)


def recursions(args: argparse.Namespace) -> Iterator[Row]:
    """Compare ``masked_gae`` with loops, and with TorchRL's estimator, which has no mask."""
    device = args.device
    mask, _ = turns_of_tokens(device)
    reward, value = torch.randn(2, ROWS, TOKENS, device=device) * mask
    done = torch.zeros(ROWS, TOKENS, 1, dtype=torch.bool, device=device)
    done[:, -1] = True
    next_value = value.roll(-1, 1)

    def ours() -> Tensor:
        return F.masked_gae(reward, value, mask, GAMMA, LMBDA)[0]

    def torchrl() -> object:
        columns = (value, next_value, reward)
        return vec_generalized_advantage_estimate(
            GAMMA, LMBDA, *(column[..., None] for column in columns), done, done
        )

    torch.testing.assert_close(ours(), gae_by_token(reward, value, mask), rtol=1e-3, atol=1e-3)
    few = max(1, args.repeats // 5)
    for name, repeats, other in (
        ("a loop over tokens, plain numbers", few, partial(gae_by_token, reward, value, mask)),
        (
            "a loop over positions, all rows at once",
            few,
            partial(gae_by_position, reward, value, mask),
        ),
        ("TorchRL's vectorised estimate, without a mask", args.repeats, torchrl),
    ):
        mine, theirs = medians(device, repeats, ours, other)
        yield name, f"{1e3 * mine:,.1f}", f"{1e3 * theirs:,.1f}", f"{theirs / mine:.1f}×"


def copying(*tensors: Tensor) -> Callable[[], object]:
    """Copy half of each tensor, which reads and writes as many bytes as the tensors have."""
    halves = [tensor[: len(tensor) // 2] for tensor in tensors]
    targets = [torch.empty_like(half) for half in halves]
    return lambda: [a.copy_(b) for a, b in zip(targets, halves, strict=True)]


class Estimator(NamedTuple):
    """A function, its inputs, and the tensors that it must read or write."""

    function: Callable[..., object]
    inputs: tuple[Any, ...]
    moved: tuple[Tensor, ...]
    pointwise: bool = True
    """Whether a compiler can fuse it into one pass."""


def all_estimators(device: str) -> Iterator[tuple[str, Estimator]]:
    """Every estimator by name."""
    mask, turns = turns_of_tokens(device)
    log_prob, old, value, reward = -torch.rand(4, ROWS, TOKENS, device=device)
    returns, advantage = torch.randn(2, ROWS, TOKENS, device=device)
    episode = torch.arange(ROWS, device=device)
    group = episode // GROUP
    outcome = torch.randn(ROWS, device=device)
    for kind in F.GROUP_ESTIMATORS:
        function = partial(
            F.group_advantage,
            kind=cast(Any, kind),
            lengths=mask.sum(-1) if kind == "opo" else None,
        )
        yield (
            f"group_advantage, {kind}, of 512 episodes",
            Estimator(function, (outcome, group), (outcome, group, outcome), False),
        )
    yield (
        "outcome_advantage, grpo",
        Estimator(
            F.outcome_advantage,
            (returns, mask, turns, episode, group),
            (returns, mask, turns, returns),
            False,
        ),
    )
    yield (
        "masked_returns",
        Estimator(F.masked_returns, (reward, mask, GAMMA), (reward, mask, reward), False),
    )
    yield (
        "masked_gae",
        Estimator(
            F.masked_gae,
            (reward, value, mask, GAMMA, LMBDA),
            (reward, value, mask, reward, value),
            False,
        ),
    )
    yield (
        "masked_whiten",
        Estimator(F.masked_whiten, (advantage, mask), (advantage, mask, advantage)),
    )
    for kind in get_args(KLKind):
        yield (
            f"kl_estimate, {kind}",
            Estimator(
                partial(F.kl_estimate, old_log_prob=old),
                (log_prob, old, kind),
                (log_prob, old, old),
            ),
        )
    for name, objective in F.OBJECTIVES.items():
        inputs = log_prob, old, advantage, mask
        extra = {"sampler_log_prob": old} if name == "decoupled_ppo" else {}
        yield (
            f"objective {name}",
            Estimator(partial(objective, **extra), inputs, (*inputs, log_prob, mask)),
        )
    for name, correction in F.CORRECTIONS.items():
        entries = log_prob, old, mask
        extra = {"advantage": advantage} if name == "off_policy_mask" else {}
        yield (
            f"correction {name}",
            Estimator(partial(correction, **extra), entries, (*entries, log_prob)),
        )
    yield "aggregate, token_mean", Estimator(F.aggregate, (log_prob, mask), (log_prob, mask))


@torch.no_grad()
def estimators(args: argparse.Namespace) -> Iterator[Row]:
    """Time every estimator, its floor, and with ``--compiled`` its compiled version."""
    for name, one in all_estimators(args.device):
        runs: list[Callable[[], object]] = [
            copying(*one.moved),
            partial(one.function, *one.inputs),
        ]
        if args.compiled and one.pointwise:
            torch.compiler.reset()  # it gives up on a function that is compiled in many ways
            runs.append(partial(torch.compile(one.function), *one.inputs))
        least, *times = medians(args.device, args.repeats, *runs)
        cells = [cell for t in times for cell in (f"{1e3 * t:,.2f}", f"{t / least:.1f}×")]
        yield name, f"{1e3 * least:,.2f}", *cells, *["–"] * (4 - len(cells))


# Forward passes


def small_model(args: argparse.Namespace, vocabulary: int = 1000) -> nn.Module:
    """A Qwen2 with random weights."""
    torch.manual_seed(0)
    heads = max(1, args.width // 64)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=32_768,
    )
    return cast(nn.Module, Qwen2ForCausalLM(config)).to(args.device)


def rows_of(lengths: Tensor, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Random rows of these lengths; every second stretch of tokens is sampled."""
    position = torch.arange(int(lengths.max()))
    attended = position < lengths[:, None]
    mask = attended & (position // 16 % 2 == 1)
    tokens = torch.randint(4, 1000, attended.shape)
    return tokens.to(device), attended.to(device), mask.to(device)


class Counted(NamedTuple):
    """A training step and its number of tokens."""

    run: Callable[[], None]
    positions: int
    """Tokens that went through the model, padding included."""


def step(model: nn.Module, batches: list[tuple[Tensor, ...]], **passes: Any) -> Counted:
    """Score batches of rows forward and backward."""
    counted = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal counted
        counted += inputs[0].numel()

    def run() -> None:
        for batch in batches:
            tokens, attended, mask = batch
            log_prob, _ = row_log_probs(model, tokens, attended, mask, passes=Passes(**passes))
            log_prob.sum().backward()
        model.zero_grad()

    run()  # what is tried once per model is tried
    embeddings = cast(Any, model).get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(count)
    run()
    hook.remove()
    return Counted(run, counted)


def passes(args: argparse.Namespace) -> Iterator[Row]:
    """Forward and backward, the tokens that go through the model and the seconds.

    The rows are of uneven length, a third of the longest in the mean. The episodes have eight turns,
    each of 32 new tokens and 32 sampled.
    """
    model = small_model(args)
    options = {} if args.dtype is None else {"dtype": getattr(torch, args.dtype)}
    lengths = (768 * torch.rand(48) ** 2).long().clamp(min=32)
    lengths[0] = 768
    uneven = rows_of(lengths, args.device)
    budget = {"micro_batch_tokens": 8 * 768}
    contenders = {
        "uneven rows, padded": step(model, [uneven], **options),
        "  padded, those of similar length together": step(model, [uneven], **budget, **options),
        "  packed": step(model, [uneven], packed=True, **budget, **options),
    }
    yield from compared(args, contenders)

    episodes, turns, new = 16, 8, 32
    tokens, attended, _ = rows_of(torch.full((episodes,), 2 * new * turns), args.device)
    position = torch.arange(2 * new * turns, device=args.device).expand_as(tokens)
    sampled = position // new % 2 == 1
    cut = []
    for end in range(2 * new, 2 * new * turns + 1, 2 * new):
        seen = (x[:, :end] for x in (tokens, attended, sampled & (position >= end - new)))
        cut.append(tuple(seen))
    contenders = {
        "episodes of 8 turns, a row a turn": step(model, cut, **options),
        "  one merged row an episode": step(model, [(tokens, attended, sampled)], **options),
    }
    yield from compared(args, contenders)


def shared_prefixes(args: argparse.Namespace) -> Iterator[Row]:
    """Rows that begin alike: a group with one prompt, and turns whose thoughts are left out later."""
    model = small_model(args)
    options = {} if args.dtype is None else {"dtype": getattr(torch, args.dtype)}

    def draw(*shape: int) -> Tensor:
        return torch.randint(0, model.config.vocab_size, shape, device=args.device)

    prompt, sampled = 512, 128
    group = torch.cat([draw(1, prompt).expand(GROUP, -1), draw(GROUP, sampled)], 1)
    attended = torch.ones_like(group, dtype=torch.bool)
    yield from compared(
        args, _packings(model, (group, attended, attended.cumsum(1) > prompt), options)
    )

    turns, new, thought, answer = 6, 32, 64, 32
    seen, rows, lengths = draw(128), [], []
    for _ in range(turns):
        seen = torch.cat([seen, draw(new)])
        said = draw(answer)
        rows.append(torch.cat([seen, draw(thought), said]))
        lengths.append(len(seen))
        seen = torch.cat([seen, said])
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    along = torch.arange(tokens.shape[1], device=args.device)
    attended = along < torch.tensor([len(row) for row in rows], device=args.device)[:, None]
    mask = attended & (along >= torch.tensor(lengths, device=args.device)[:, None])
    thoughts = compared(args, _packings(model, (tokens, attended, mask), options))
    for name, *others in thoughts:
        yield (name.replace("a group of 8", "six turns without old thoughts"), *others)


def _packings(
    model: nn.Module, rows: tuple[Tensor, ...], options: dict[str, Any]
) -> dict[str, Counted]:
    return {
        "a group of 8, padded": step(model, [rows], **options),
        "  packed": step(model, [rows], packed=True, **options),
        "  trees": step(model, [rows], packed="tree", **options),
    }


def compared(args: argparse.Namespace, contenders: dict[str, Counted]) -> Iterator[Row]:
    """Rows of a table, each compared with the first."""
    seconds = medians(args.device, max(1, args.repeats // 5), *(c.run for c in contenders.values()))
    first = next(iter(contenders.values()))
    for (name, one), time_taken in zip(contenders.items(), seconds, strict=True):
        yield (
            name,
            f"{one.positions:,}",
            f"{first.positions / one.positions:.2f}×",
            f"{time_taken:.2f}",
            f"{seconds[0] / time_taken:.2f}×",
            f"{peak_of(one.run, args.device) / 2**20:,.0f}",
        )


# Memory


def peak_of(run: Callable[[], object], device: str) -> int:
    """Peak of the memory that a call takes, in bytes."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # Memory that was freed would hide what the call takes.
    before = _forget_peak()
    run()
    return _memory("VmHWM") - before


def peak(vocabulary: int, sampled: float, how: str, args: argparse.Namespace, out: Any) -> None:
    """Send the peak memory in bytes and the seconds of scoring forward and backward."""
    args.width, args.layers = 64, 2
    model = small_model(args, vocabulary)
    tokens, attended, mask = rows_of(torch.full((4,), 1024), args.device)
    mask &= torch.rand(mask.shape, device=args.device) < 2 * sampled

    def run() -> None:
        if how == "autograd":
            logits = cast(Any, model)(input_ids=tokens).logits[:, :-1].float()
            picked = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
            (picked * mask[:, 1:]).sum().backward()
        else:
            full = how == "whole logits"
            log_prob, _ = row_log_probs(model, tokens, attended, mask, full_logits=full)
            log_prob.sum().backward()

    begin = time.perf_counter()
    taken = peak_of(run, args.device)
    out.put((taken, time.perf_counter() - begin))


def _forget_peak() -> int:
    """Reset this process's peak memory; returns its current memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    """A memory field of this process's status in Linux, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def memory(args: argparse.Namespace) -> Iterator[Row]:
    """Measure memory for rows ``[4, 1024]`` with a third of the tokens sampled, a process for each.

    *Autograd* is a ``log_softmax`` of all logits in float32.
    """
    context = multiprocessing.get_context("spawn")
    for vocabulary in (32_000, 152_000):
        for how in ("autograd", "whole logits", "default"):
            out = context.SimpleQueue()
            work = context.Process(target=peak, args=(vocabulary, 0.33, how, args, out))
            work.start()
            taken, seconds = out.get()
            work.join()
            yield f"{vocabulary:,} tokens, {how}", f"{taken / 2**20:,.0f}", f"{seconds:.1f}"


COLUMNS = ("forward and backward", "tokens", "fewer", "s", "faster", "peak, MiB")
PARTS = {
    "recursions": Part(
        ("masked_gae beside", "ours, ms", "ms", "ratio"), (55, 15, 15, 15), recursions
    ),
    "estimators": Part(
        ("512 rows of 4,096 tokens", "floor, ms", "ms", "ratio", "compiled, ms", "ratio"),
        (40, 12, 12, 12, 12, 12),
        estimators,
    ),
    "passes": Part(COLUMNS, (40, 12, 12, 12, 12, 12), passes),
    "trees": Part(COLUMNS, (40, 12, 12, 12, 12, 12), shared_prefixes),
    "memory": Part(("vocabulary, how", "peak, MiB", "s"), (60, 20, 20), memory),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="the parts")
    parser.add_argument("--repeats", type=int, default=15, help="turns; the median counts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--compiled", action="store_true", help="compile, too: needs a C++ compiler"
    )
    parser.add_argument("--dtype", help="of the forward passes, as autocast takes it")
    parser.add_argument("--width", type=int, default=64, help="of the model")
    parser.add_argument("--layers", type=int, default=2, help="of the model")
    parser.add_argument("--rst", type=Path, help="write the tables here too, for the documentation")
    args = parser.parse_args()

    torch.manual_seed(0)
    print(f"device {args.device}, {torch.get_num_threads()} threads")
    show([PARTS[name] for name in args.only], args, args.rst)


if __name__ == "__main__":
    main()
