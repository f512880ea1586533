"""
A world model from demonstrations on disk
=========================================

Demonstrations lie in a file; a world model learns from clips of them. Then it meets states that nobody
demonstrated, so we collect some, and mix both.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchrl.data import ReplayBuffer
from torchrl.envs import PendulumEnv, StepCounter, TransformedEnv

from torchrl_mt.data import ClipSampler, EpisodeStorage, EpisodeWriter, recent
from torchrl_mt.datasets import (
    ClipDataset,
    EpisodeDataset,
    load_episodes,
    open_episodes,
    save_episodes,
)

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp())

# %%
# Demonstrations
# --------------
#
# A controller holds the pendulum upright and damps whatever disturbs it. Its episodes go to a file, one
# ``write_episode`` each. An episode is on disk once that returns, even if the process is killed then.
# What holds for a whole episode is its ``metadata``.

env = TransformedEnv(PendulumEnv(), StepCounter(max_steps=50))
env.set_seed(0)


def demonstrator(tensordict):
    torque = -8.0 * tensordict["th"].sin() - 2.0 * tensordict["thdot"] + 0.5 * torch.randn(())
    return tensordict.set("action", torque.clamp(-2, 2).reshape(1))


def play(policy, start=None):
    """One episode, without the constants that are the same at every step."""
    begin = env.reset()
    if start is not None:
        begin["th"], begin["thdot"] = start
    episode = env.rollout(50, policy, auto_reset=False, tensordict=begin)
    return episode.exclude("params", ("next", "params"))


with open_episodes(folder / "upright.h5") as out:
    for i in range(40):
        start = 0.3 * torch.randn(()), torch.randn(())
        out.write_episode(play(demonstrator, start), metadata={"player": "controller", "number": i})

# %%
# Reading them
# ------------
#
# Opening reads the lengths only. An episode comes back as it was written, bit for bit.

demonstrations = EpisodeDataset(folder / "upright.h5", keys=["th", "thdot", "action", "next"])
print(demonstrations)
print(demonstrations.metadata(3), demonstrations.episode(3)["th"][:4])

# %%
# A :class:`~torchrl_mt.datasets.ClipDataset` numbers all clips of 10 steps. PyTorch's ``DataLoader``
# shuffles them, so that every clip is seen once an epoch.

clips = ClipDataset(demonstrations, slice_len=10)
loader = DataLoader(clips, batch_size=64, shuffle=True)
print(f"{len(clips)} clips in {len(demonstrations)} episodes, {len(loader)} batches an epoch")

# %%
# The world model
# ---------------
#
# From the first state of a clip and all its actions, it predicts the states that follow, one from the
# other. The loss compares them with what really followed.


def observe(state):
    return torch.stack([state["th"].cos(), state["th"].sin(), state["thdot"] / 8], -1)


model = nn.Sequential(
    nn.Linear(4, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 3)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def predict(clips):
    """The observations that follow each step of clips ``[B, 10]``."""
    now, following = observe(clips)[:, 0], []
    for action in clips["action"].unbind(1):
        now = now + model(torch.cat([now, action / 2], -1))
        following.append(now)
    return torch.stack(following, 1)


def learn(clips):
    loss = (predict(clips) - observe(clips["next"])).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


for _ in range(15):
    for batch in loader:
        learn(batch)

# %%
# It knows the states near the top, where the demonstrator kept the pendulum. Elsewhere it is lost. The
# tests are episodes that it never saw, of the controller and of random torques:


def held_out(policy, start=lambda: None):
    storage = EpisodeStorage(1000)
    for _ in range(10):
        storage.append(play(policy, start()))
    return next(iter(DataLoader(ClipDataset(storage, 10), batch_size=10_000)))


near_the_top = held_out(demonstrator, lambda: (0.3 * torch.randn(()), torch.randn(())))
anywhere = held_out(env.rand_action)


@torch.no_grad()
def errors():
    """The mean error after each of the 10 steps, near the top and anywhere."""
    sets = {"near the top": near_the_top, "anywhere": anywhere}
    return {
        name: (predict(clips) - observe(clips["next"])).square().sum(-1).sqrt().mean(0)
        for name, clips in sets.items()
    }


before = errors()
print({name: round(error[-1].item(), 3) for name, error in before.items()})

# %%
# Online data, mixed in
# ---------------------
#
# Two buffers: one warm-started from the file, one for what is collected now. Half of each batch comes
# from each. The selector ``recent`` prefers new clips of the online buffer at first: those of the newest
# 2,000, until the 200th sample; from then on all.


def clip_buffer(selector=None):
    return ReplayBuffer(
        storage=EpisodeStorage(max_steps=5_000),
        writer=EpisodeWriter(),
        sampler=ClipSampler(slice_len=10, layout="clips", selector=selector),
        batch_size=32 * 10,
    )


demonstrated, online = clip_buffer(), clip_buffer(recent(2_000, until=200))
load_episodes(folder / "upright.h5", demonstrated)

for _ in range(40):
    online.extend(play(env.rand_action))
    for _ in range(10):
        learn(torch.cat([demonstrated.sample(), online.sample()]))

after = errors()
print({name: round(error[-1].item(), 3) for name, error in after.items()})

# %%
# The picture: how far the prediction is off after 1 to 10 steps. With online data, the model knows its
# way everywhere, and has not forgotten the demonstrations.

figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for name, color in (("anywhere", "tab:orange"), ("near the top", "tab:blue")):
    axes.plot(range(1, 11), before[name], "--", color=color, label=f"{name}, demonstrations alone")
    axes.plot(range(1, 11), after[name], color=color, label=f"{name}, online data mixed in")
axes.set(xlabel="steps predicted", ylabel="mean error", yscale="log")
axes.legend()
plt.show()

# %%
# What was collected is left for others: a file like the first, or one of the other formats.

save_episodes(online, folder / "random.h5")
print(EpisodeDataset(folder / "random.h5"))
