"""
Train an agent over several turns
=================================

A small language model walks through a house. In each room a sign tells the way and the model answers
with a word. The right word is worth 1 and leads to the next room, any other leaves it where it is. The
walk is over after three rooms, or after five turns. The model starts from random weights and learns by
trial alone.

What follows is what one writes for a large model too: an environment, an engine, a collector, a replay
buffer, advantages and a loss.
"""

import random

import matplotlib.pyplot as plt
import torch
from torchrl.data import ReplayBuffer

from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.data import EpisodeSampler, EpisodeStorage, EpisodeWriter
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss
from torchrl_mt.testing import tiny_chat_model
from torchrl_mt.transforms import DiscountedReturn, MergeTurns

ROOMS, TURNS, GAMMA = 3, 5, 0.9
EPISODES, UPDATES = 64, 24

torch.manual_seed(0)
torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other

# %%
# The environment
# ---------------
#
# A :class:`~torchrl_mt.envs.TextEnv` says something, is given the model's text, and says what
# came of it. It never sees a token. ``reset`` receives one item of the data, here the signs of a
# house, so that the same episode can be played again. Every episode gets a copy of the
# environment to itself. ``inline`` says that the methods return at once; without it they run in
# worker threads, where a slow tool holds up no other episode.

SIGNS = ["left", "right", "ahead"]


class House(TextEnv):
    inline = True

    def reset(self, data=None):
        self.signs = list(data)
        self.room = 0
        return [self.sign()]

    def step(self, response):
        right = response == self.signs[self.room]
        self.room += right
        if self.room == ROOMS:
            return TextStep(reward=1.0, done=True)
        return TextStep([self.sign()], reward=float(right))

    def sign(self):
        return {"role": "user", "content": self.signs[self.room]}


def houses(seed=0):
    rng = random.Random(seed)
    while True:
        yield rng.choices(SIGNS, k=ROOMS)


# %%
# The model
# ---------
#
# Any causal language model of transformers will do whose tokenizer has a chat template and an
# end-of-turn token. To keep this page quick we take a tiny one with random weights, to which a
# token is a word.

model, tokenizer = tiny_chat_model(SIGNS)

# %%
# Collecting
# ----------
#
# The *engine* turns prompt tokens into sampled tokens, many conversations at once. The
# *collector* plays whole episodes, within limits, and writes each batch to the buffer. Storage,
# writer and sampler of the buffer know what an episode is: it is stored whole, with the discounted
# return of every turn, and sampled whole. ``batch_size`` therefore counts episodes.

engine = TransformersEngine(model, tokenizer)
buffer = ReplayBuffer(
    storage=EpisodeStorage(max_steps=EPISODES * TURNS),
    writer=EpisodeWriter(transform=DiscountedReturn(GAMMA)),
    sampler=EpisodeSampler(replacement=False),
    transform=MergeTurns(pad_token_id=tokenizer.pad_token_id),
    batch_size=EPISODES,
)
collector = MultiTurnCollector(
    House(),
    engine,
    houses(),
    episodes_per_batch=EPISODES,
    limits=Limits(max_turns=TURNS, max_response_tokens=3),
    replay_buffer=buffer,
)
batches = iter(collector)
next(batches)
print(collector.stats())

# %%
# An episode
# ----------
#
# A step is a turn: the tokens the model saw, the tokens it sampled, and under ``"next"`` what
# came of it. Here is the longest walk of this first batch. The prompt of each turn is the prompt
# before, the response as it was sampled, and what the house said since: nothing was decoded and
# encoded again. An untrained model shows why that matters: it also samples special tokens, which
# the house does not hear, and its text encoded again would be other tokens than it sampled.

longest = buffer.storage.episode(int(buffer.storage.lengths.argmax()))
prompts = longest.get(("tokens", "prompt"), as_list=True)
responses = longest.get(("tokens", "response"), as_list=True)
log_probs = longest.get(("log_probs", "response"), as_list=True)
for turn, prompt in enumerate(prompts):
    print(f"turn {turn}")
    print("  prompt    ", tokenizer.decode(prompt))
    print("  response  ", tokenizer.decode(responses[turn]))
    print("  log-probs ", log_probs[turn].numpy().round(2))
    print("  reward     {:.0f}".format(longest["next", "reward"][turn].item()))
    print("  return     {:.2f}".format(longest["next", "return"][turn].item()))
print("ended for:", longest["stop_reason"][-1])

# %%
# A row
# -----
#
# What is trained on are rows: a whole conversation each, made from the turns when they are
# sampled (:class:`~torchrl_mt.transforms.MergeTurns`). The assistant mask is true on the tokens
# that the model sampled and on nothing else. It has holes, where the house speaks, and everything
# that is computed along a row takes it as it is.

rows = buffer.sample()
for key, value in sorted(rows.items(True, True), key=str):
    name = key if isinstance(key, str) else ".".join(key)
    print(f"{name:<25} {list(value.shape)} {value.dtype}")

# %%
# The longest of them, token by token:

row = rows[rows["masks", "all_attention_mask"].sum(-1).argmax()]
print(f"{'token':<12} sampled  turn  reward  return")
for i in row["masks", "all_attention_mask"].nonzero().squeeze(-1).tolist():
    print(
        f"{tokenizer.decode(row['tokens', 'full'][i]):<12} "
        f"{'yes' if row['masks', 'all_assistant_mask'][i] else '':<8} "
        f"{row['turns', 'full'][i].item():>4} "
        f"{row['rewards', 'full'][i].item():>7.0f} "
        f"{row['rewards', 'to_go'][i].item():>7.2f}"
    )

# %%
# Advantages and loss
# -------------------
#
# :class:`~torchrl_mt.objectives.ExperienceMaker` adds what the loss needs. ``"turn"`` compares
# the return of each turn with that of the same turn in the other walks of the batch, so a turn is
# credited with what was earned from it on, and with nothing before. (``"grpo"`` and its relatives
# compare whole episodes within groups that share an item: ask the collector for ``group_size=8``,
# say.)
#
# :class:`~torchrl_mt.objectives.MultiTurnLoss` is a TorchRL loss module: it returns ``loss_*``
# entries, whose sum one minimises, and a few figures to watch. The entropy bonus keeps the model
# trying all the signs until it has understood them.

maker = ExperienceMaker(model, advantage="turn", gamma=GAMMA)
loss_module = MultiTurnLoss(model, objective="ppo", clip_epsilon=0.2, entropy_coef=0.05)
print(sorted(loss_module(maker(rows)).keys()))

# %%
# Learning
# --------
#
# The rest is the usual loop. The engine samples with the model's own weights, and nothing is
# sampled between two batches, so the model may be changed there. ``update_policy_weights_`` then
# tells the engine to count a new version and to forget what it had cached under the old one.

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, UPDATES)
passed = []
for update in range(UPDATES):
    buffer.empty()
    next(batches)
    rooms = buffer.storage[:]["next", "reward"].sum().item() / EPISODES
    turns = buffer.storage.lengths.float().mean().item()
    passed.append(rooms)
    rows = maker(buffer.sample())
    for _ in range(2):
        for shard in rows[torch.randperm(len(rows))].split(EPISODES // 2):
            losses = loss_module(shard)
            (losses["loss_objective"] + losses["loss_entropy"]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    schedule.step()
    collector.update_policy_weights_(model)
    if update % 4 == 0 or update == UPDATES - 1:
        print(f"update {update:2d}: {rooms:.2f} rooms in {turns:.2f} turns")

# %%
# From random words to walking through the house:

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.plot(passed)
axes.axhline(ROOMS, color="grey", linestyle="--")
axes.set(xlabel="update", ylabel="rooms passed", ylim=(0, ROOMS + 0.2))
plt.show()

# %%
# A walk as the environment heard it:

for messages in buffer.storage.episode(0)["text"]:
    for message in messages:
        print(f"{message['role']:>9}: {message['content']}")

collector.shutdown()
engine.close()

# %%
# ``examples/guess_number.py`` is the same loop around a harder game, with a measured optimum, a
# warm start and a report.
