"""Balance a pole whose velocities are hidden: a recurrent Q-network learns from prioritized clips.

The network sees positions but no velocities, so it needs a memory. TorchRL's collector plays, the
storage keeps whole episodes, and the sampler draws clips in proportion to their TD errors. The first
steps of a clip only warm up the memory (burn-in). On the others the network learns by double Q-learning
with three-step returns, as R2D2 does (Kapturowski et al., 2019). With seeds 0 and 1, 400 updates on
14,848 steps reach 500 of 500.

    python examples/masked_cartpole.py    # --resume goes on with a run that was stopped
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import tempfile
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import Categorical, Composite, TensorDictReplayBuffer, Unbounded
from torchrl.envs import (
    Compose,
    EnvBase,
    InitTracker,
    StepCounter,
    TransformedEnv,
    set_exploration_type,
)
from torchrl.envs.utils import ExplorationType
from torchrl.modules import MLP, EGreedyModule, GRUModule, QValueModule, set_recurrent_mode
from tqdm import tqdm

from torchrl_mt.data import EpisodeStorage, EpisodeWriter, PrioritizedClipSampler
from torchrl_mt.datasets import RunCheckpoint
from torchrl_mt.view import RunLog, plot_run

MAX_STEPS = 500
NUM_ENVS = 16
FRAMES_PER_BATCH = 256
RANDOM_FRAMES = 2000  # to begin with
FRAMES_PER_UPDATE = 32
SLICE_LEN, BURN_IN = 32, 8
GAMMA, N_STEPS = 0.99, 3
TARGET_RATE = 0.05
KEPT = [
    *("observation", "action", "is_init", ("collector", "traj_ids")),
    *(("next", key) for key in ("observation", "reward", "done", "terminated", "truncated")),
]


class MaskedCartPole(EnvBase):
    """A batch of Gymnasium's ``CartPole-v1`` that shows positions only.

    ``observation`` is ``[..., 2]``: the cart's position and the pole's angle. Each step is worth 1. An
    episode ends when the pole falls or the cart leaves the track.
    """

    def __init__(self, num: int) -> None:
        super().__init__(device="cpu", batch_size=[num])
        self.observation_spec = Composite(observation=Unbounded((num, 2)), shape=[num])
        self.action_spec = Categorical(2, shape=(num,))
        self.reward_spec = Unbounded((num, 1))
        self.state = torch.zeros(num, 4)  # place, speed, angle, turning speed
        self.generator = torch.Generator()

    def _set_seed(self, seed: int | None) -> None:
        self.generator.manual_seed(0 if seed is None else seed)

    def _reset(self, td: TensorDictBase | None = None, **_) -> TensorDict:
        fresh = torch.rand(self.state.shape, generator=self.generator) * 0.1 - 0.05
        again = None if td is None else td.get("_reset", None)
        self.state = fresh if again is None else torch.where(again.view(-1, 1), fresh, self.state)
        return TensorDict({"observation": self._seen()}, self.batch_size)

    def _step(self, td: TensorDictBase) -> TensorDict:
        _, speed, angle, turning = self.state.unbind(-1)
        force = 20.0 * td["action"] - 10.0
        sin, cos = angle.sin(), angle.cos()
        pushed = (force + 0.05 * turning**2 * sin) / 1.1
        turned = (9.8 * sin - cos * pushed) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        moved = pushed - 0.05 * turned * cos / 1.1
        self.state = self.state + 0.02 * torch.stack([speed, moved, turning, turned], dim=-1)
        lost = self.state[:, ::2].abs() > torch.tensor([2.4, math.radians(12)])
        lost = lost.any(-1, keepdim=True)
        return TensorDict(
            {
                "observation": self._seen(),
                "reward": torch.ones_like(lost, dtype=torch.float),
                "terminated": lost,
                "done": lost.clone(),
            },
            self.batch_size,
        )

    def _seen(self) -> Tensor:
        return self.state[:, ::2] * torch.tensor([2.0, 20.0])  # in units of about one


def make_network(width: int) -> TensorDictSequential:
    """A recurrent Q-network: a GRU and a head."""
    memory = GRUModule(
        input_size=2,
        hidden_size=width,
        in_keys=["observation", "memory"],
        out_keys=["features", ("next", "memory")],
    )
    head = MLP(2 + width, 2, num_cells=[64], activation_class=nn.ReLU)
    worth = TensorDictModule(head, ["observation", "features"], ["action_value"])
    return TensorDictSequential(memory, worth)


def make_env(num: int, network: TensorDictSequential, seed: int) -> TransformedEnv:
    env = TransformedEnv(
        MaskedCartPole(num),
        Compose(InitTracker(), StepCounter(MAX_STEPS), network[0].make_tensordict_primer()),
    )
    env.set_seed(seed)
    return env


def greedy(network: TensorDictSequential, env: TransformedEnv) -> TensorDictSequential:
    """The policy that takes the action of the highest value."""
    best = QValueModule(action_space="categorical", spec=env.action_spec_unbatched)
    return TensorDictSequential(network, best)


def make_buffer(clips: int) -> TensorDictReplayBuffer:
    """A buffer of whole episodes that samples clips ``[B, T]``, padded if an episode is short."""
    return TensorDictReplayBuffer(
        storage=EpisodeStorage(max_steps=100_000),
        writer=EpisodeWriter(),
        sampler=PrioritizedClipSampler(
            alpha=0.6,
            beta=0.4,
            slice_len=SLICE_LEN,
            burn_in=BURN_IN,
            strict_length=False,
            pad_output=True,
            layout="clips",
        ),
        batch_size=clips * SLICE_LEN,
    )


def n_step_returns(reward: Tensor, value: Tensor, mask: Tensor, gamma: float, n: int) -> Tensor:
    """Discounted ``n``-step returns: ``n`` rewards, fewer at a clip's end, and the value after them.

    Args:
        reward: ``[B, T]``.
        value: ``[B, T + 1]``, value of each state and of the one after the last; 0 after termination.
        mask: bool ``[B, T]``, false for padding.
        gamma: discount factor.
        n: number of steps.
    """
    returns = value
    for _ in range(n):
        one_more = torch.where(mask, reward + gamma * returns[:, 1:], value[:, :-1])
        returns = torch.cat([one_more, value[:, -1:]], dim=1)
    return returns[:, :-1]


def td_errors(network: nn.Module, target: nn.Module, clips: TensorDictBase) -> Tensor:
    """TD errors ``[B, T]`` of the actions taken."""
    # Each state once: the state after a step is the state before the next.
    seen = torch.cat([clips["observation"][:, :1], clips["next", "observation"]], dim=1)
    start = torch.zeros(*seen.shape[:2], 1, dtype=torch.bool, device=seen.device)
    start[:, 0] = True
    states = TensorDict({"observation": seen, "is_init": start}, seen.shape[:2])
    with set_recurrent_mode(True):
        value = network(states.copy())["action_value"]
        with torch.no_grad():
            next_value = target(states)["action_value"]
    with torch.no_grad():
        chosen = value.argmax(-1, keepdim=True)  # double Q-learning
        best = next_value.gather(-1, chosen).squeeze(-1)
        best[:, 1:] *= ~clips["next", "terminated"].squeeze(-1)
        reward = (1 - GAMMA) * clips["next", "reward"].squeeze(-1)  # so that no value is above one
        returns = n_step_returns(reward, best, clips["collector", "mask"], GAMMA, N_STEPS)
    taken = value[:, :-1].gather(-1, clips["action"].unsqueeze(-1)).squeeze(-1)
    return taken - returns


@torch.no_grad()
def evaluate(network: TensorDictSequential, episodes: int, seed: int) -> float:
    """Mean return of the greedy policy."""
    env = make_env(episodes, network, seed)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        played = env.rollout(
            MAX_STEPS, greedy(network, env), break_when_any_done=False, auto_cast_to_device=True
        )
    before_the_end = played["next", "done"].squeeze(-1).cumsum(1) == 0
    return (before_the_end.sum(1) + 1).clamp_max(MAX_STEPS).float().mean().item()


def positive(text: str) -> int:
    """An argument that must be a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Balance a pole whose velocities are hidden.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--updates", type=positive, default=3000, help="gradient steps, at most")
    parser.add_argument("--goal", type=float, default=475, help="mean return to stop at")
    parser.add_argument("--clips", type=positive, default=32, help="clips of a batch")
    parser.add_argument("--width", type=positive, default=32, help="of the network's memory")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate, falling to 0")
    parser.add_argument("--every", type=positive, default=200, help="updates between evaluations")
    parser.add_argument("--episodes", type=positive, default=32, help="episodes of an evaluation")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--out", type=Path, default=Path("runs/masked_cartpole"), help="folder")
    parser.add_argument("--device", default="cpu", help="where the network lives")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    args = parser.parse_args(argv)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()
    except OSError as error:
        parser.error(f"--out: cannot write into {args.out}: {error.strerror}")
    if not args.resume and (args.out / "checkpoints").exists():
        parser.error(f"--out: {args.out} has a run: --resume goes on with it")
    return args


def train(args: argparse.Namespace) -> float:
    """Play, learn, evaluate and draw; return the mean return of fresh episodes."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
    network = make_network(args.width).to(args.device)
    target = copy.deepcopy(network).requires_grad_(False)  # a running mean: it also evaluates best
    buffer = make_buffer(args.clips)
    env = make_env(NUM_ENVS, network, args.seed)
    explore = EGreedyModule(
        env.action_spec_unbatched.to(args.device),
        eps_init=1.0,
        eps_end=0.1,
        annealing_num_steps=10_000,
    )
    collector = Collector(
        env,
        TensorDictSequential(greedy(network, env), explore),
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=-1,
        policy_device=args.device,
        storing_device="cpu",
        exploration_type=ExplorationType.RANDOM,
        postproc=lambda batch: batch.select(*KEPT).contiguous(),
        replay_buffer=buffer,
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, args.updates)

    def learn() -> None:
        clips = (sampled := buffer.sample()).to(args.device)
        error = td_errors(network, target, clips)
        learned = clips["collector", "mask"] & ~clips["burn_in"]
        weight = clips["priority_weight"] / clips["priority_weight"].max()
        loss = (weight * error.square())[learned].mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
                slow.lerp_(fast, TARGET_RATE)
        sampled["td_error"] = (error.detach().abs() * learned).cpu()
        buffer.update_tensordict_priority(sampled)

    run = {"frames": 0, "updates": 0, "reached": 0.0}
    batches = iter(collector)
    parts = {"model": network, "target": target, "optimizer": optimizer, "schedule": schedule}
    parts |= {"buffer": buffer, "explore": explore, "env": env.generator, "run": run}
    checkpoint = RunCheckpoint(args.out / "checkpoints")
    if checkpoint.restore(**parts):
        collector.reset()
    else:
        (args.out / "metrics.jsonl").unlink(missing_ok=True)  # of an earlier run
    bar = tqdm(total=args.updates, initial=run["updates"], desc="training", mininterval=1.0)
    log = RunLog(args.out, loggers=(), config=args, progress=False)
    while run["updates"] < args.updates and run["reached"] < args.goal:
        while run["frames"] < RANDOM_FRAMES + run["updates"] * FRAMES_PER_UPDATE:
            next(batches)
            explore.step(FRAMES_PER_BATCH)
            run["frames"] += FRAMES_PER_BATCH
        learn()
        run["updates"] += 1
        bar.update()
        if run["updates"] % args.every == 0 or run["updates"] == args.updates:
            run["reached"] = evaluate(target, args.episodes, seed=run["updates"])
            log.log(run["updates"], {"frames": run["frames"], "eval/reward": run["reached"]})
            bar.set_postfix({"return": f"{run['reached']:.0f}"})
            buffer.writer.flush()  # all episodes end here, as they do for a run that goes on
            checkpoint.save(run["updates"], **parts)
            collector.reset()
    collector.shutdown()
    bar.close()
    log.close()

    reached = evaluate(target, 100, seed=args.seed + 1_000_000)
    print("after {updates} updates and {frames} steps of the environment:".format(**run))
    print(f"mean return of 100 fresh episodes: {reached:.1f} of {MAX_STEPS}")
    try:
        print(f"curve: {plot_run(args.out)} (as a picture: run.png)")
    except ImportError as error:
        print(f"no curve: {error}")
    return reached


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        train(args)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
