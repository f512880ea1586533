"""
Clips of whole episodes
=======================

The buffer of the first tutorial does not need language. An episode is any TensorDict with one entry per
step. World models, sequence policies and recurrent critics learn from *clips*: runs of consecutive
steps. Here a pendulum swings at random, TorchRL's own collector records it, and we sample clips.
"""

import matplotlib.pyplot as plt
import torch
from torchrl.collectors import Collector
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import PendulumEnv, SerialEnv, StepCounter, TransformedEnv

from torchrl_mt.data import ClipSampler, EpisodeStorage, EpisodeWriter
from torchrl_mt.transforms import DiscountedReturn

torch.manual_seed(0)

# %%
# Pieces in, episodes out
# -----------------------
#
# A collector cuts its batches after a number of steps, even within an episode. Here each batch has
# 25 steps of two pendulums, and an episode has 60. The writer assembles the pieces and stores an
# episode once it has ended. So its transform sees only whole episodes, and can compute returns.


def make_env():
    return TransformedEnv(PendulumEnv(), StepCounter(max_steps=60))


buffer = TensorDictReplayBuffer(
    storage=EpisodeStorage(max_steps=400),
    writer=EpisodeWriter(transform=DiscountedReturn(gamma=0.99)),
    sampler=ClipSampler(slice_len=15),
    batch_size=8 * 15,  # counts steps
)
collector = Collector(SerialEnv(2, make_env), policy=None, frames_per_batch=50, total_frames=500)
collector.set_seed(0)
for batch in collector:
    buffer.extend(batch.exclude("params", ("next", "params")))  # the same at every step
    print(
        f"stored: {buffer.storage.lengths.tolist()}, "
        f"under way: {[len(steps) for steps in buffer.writer.open_episodes.values()]}"
    )
collector.shutdown()

# %%
# At most 360 of ``max_steps=400`` are used. If there is no room for a new episode, the oldest
# *whole* episodes are evicted, never a part of one. And ``("next", k)`` equals ``k`` one step
# later, so both are stored once:

print("kept once:", buffer.storage.shared_keys)
print(buffer.storage.episode(0))

# %%
# Clips
# -----
#
# Every clip of 15 consecutive steps of one episode is sampled with equal probability. No clip
# crosses from one episode into another. The last step of a clip is marked ``truncated``, so value
# estimators do not look beyond it. TorchRL's ``SliceSampler`` does the same, and ``batch_size``
# counts steps in both.

print("clips to draw from:", buffer.storage.num_clips(15))

clips = buffer.sample().reshape(8, 15)  # a sample is flat, one clip after the other
print("first and last step of each:", clips["step_count"][:, [0, -1], 0].tolist())
print("truncated:", clips["next", "truncated"][0, :, 0].int().tolist())

# %%
# The clips, drawn over their episodes:

figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for i, episode in enumerate(buffer.storage.episodes()):
    axes.plot(range(60 * i, 60 * i + 60), episode["thdot"], color="lightgrey")
    for clip in clips:
        first = int(clip["step_count"][0])
        if torch.equal(clip["thdot"], episode["thdot"][first : first + 15]):
            axes.plot(range(60 * i + first, 60 * i + first + 15), clip["thdot"], linewidth=2)
axes.set(xlabel="stored step", ylabel="angular velocity")
plt.show()

# %%
# ``examples/pendulum_clips.py`` trains a world model of the pendulum on such clips.
