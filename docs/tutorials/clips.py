"""
Clips of whole episodes
=======================

The buffer of the first tutorial has nothing to do with language: an episode is any TensorDict with one
entry a step. World models, sequence policies and critics over time learn from *clips*, runs of
consecutive steps. Here a pendulum swings at random, TorchRL's own collector watches it, and we sample
clips of what it saw.
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
# A collector cuts its batches by number of steps, wherever an episode stands at that moment. Here
# each batch has 25 steps of two pendulums, and an episode has 60. The writer puts the pieces
# together and hands an episode to the storage once it has ended, so its transform sees whole
# episodes only: the one place where a return can be computed.


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
# Of ``max_steps=400`` no more than 360 are used: when there is no room for an episode, the oldest
# *whole* episodes leave. No half of one stays behind. And ``("next", k)`` is ``k`` one step
# later, so it is kept once:

print("kept once:", buffer.storage.shared_keys)
print(buffer.storage.episode(0))

# %%
# Clips
# -----
#
# Every clip of 15 consecutive steps of one episode is drawn with equal probability, and none runs
# from one episode into another. The last step of a clip is marked ``truncated``, so that value
# estimators do not look past it. This and the meaning of ``batch_size`` are those of TorchRL's
# ``SliceSampler``.

print("clips to draw from:", buffer.storage.num_clips(15))

clips = buffer.sample().reshape(8, 15)  # a sample is flat, one clip after the other
print("first and last step of each:", clips["step_count"][:, [0, -1], 0].tolist())
print("truncated:", clips["next", "truncated"][0, :, 0].int().tolist())

# %%
# The clips in the episodes that they come from:

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
# ``examples/pendulum_clips.py`` trains a model of the pendulum on such clips.
