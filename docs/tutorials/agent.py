"""
Train an agent over several turns
=================================

A small language model walks through a house. In each room a sign shows the way, and the model answers
with a word. The right word earns 1 and leads to the next room. With any other word the model stays where
it is. The walk ends after three rooms, or after five turns. The model starts from random weights and
learns by trial and error alone.

The parts are the same as for a large model: an environment, an engine, a collector, a replay buffer,
advantages and a loss.
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
# A :class:`~torchrl_mt.envs.TextEnv` exchanges messages with the model. It receives the model's
# text and returns the next messages and a reward. It never sees a token. ``reset`` receives one
# item of the data, here the signs of a house, so the same episode can be played again. Every
# episode gets its own copy of the environment. ``inline`` says that the methods return at once.
# Without it they run in threads, so a slow tool does not delay other episodes.

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
# Any causal language model of transformers works if its tokenizer has a chat template and an
# end-of-turn token. To keep this page fast, we use a tiny one with random weights. Each of its
# tokens is a word.

model, tokenizer = tiny_chat_model(SIGNS)

# %%
# Collecting
# ----------
#
# The *engine* samples responses to prompt tokens, for many conversations at once. The
# *collector* plays whole episodes, within limits, and writes each batch to the buffer. The buffer
# stores whole episodes, with the discounted return of every turn, and samples whole episodes.
# So ``batch_size`` counts episodes.

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
# A step is a turn: the tokens that the model saw, the tokens that it sampled, and the result under
# ``"next"``. Below is the longest walk of the first batch. The prompt of each turn is the previous
# prompt, the response as sampled, and the new message of the house. Nothing was decoded and
# encoded again. An untrained model shows why that matters: it also samples special tokens, and
# encoding its text again would give different tokens.

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
# Training uses rows, each a whole conversation.
# :class:`~torchrl_mt.transforms.MergeTurns` makes them from the sampled turns. The assistant mask
# is true on the tokens that the model sampled, and nowhere else. It has holes where the house
# speaks, and every function of this library handles such holes.

rows = buffer.sample()
for key, value in sorted(rows.items(True, True), key=str):
    name = key if isinstance(key, str) else ".".join(key)
    print(f"{name:<25} {list(value.shape)} {value.dtype}")

# %%
# The longest row, token by token:

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
# the return of each turn with the same turn in the other walks of the batch. So a turn gets credit
# for the rewards from that turn on, and for none before. (``"grpo"`` and similar kinds compare
# whole episodes in groups that share an item. They need ``group_size=8``, for example, in the
# collector.)
#
# :class:`~torchrl_mt.objectives.MultiTurnLoss` is a TorchRL loss module. It returns ``loss_*``
# entries, whose sum you minimise, and a few diagnostics. The entropy bonus keeps the model
# exploring all words until it has understood the signs.

maker = ExperienceMaker(model, advantage="turn", gamma=GAMMA)
loss_module = MultiTurnLoss(model, objective="ppo", clip_epsilon=0.2, entropy_coef=0.05)
print(sorted(loss_module(maker(rows)).keys()))

# %%
# Learning
# --------
#
# The rest is the usual loop. The engine samples with the model's own weights. Nothing is sampled
# between two batches, so the model can be updated there. ``update_policy_weights_`` then makes the
# engine count a new version and drop its cache of the old one.

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
# The learning curve, from random words to walking through the house:

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.plot(passed)
axes.axhline(ROOMS, color="grey", linestyle="--")
axes.set(xlabel="update", ylabel="rooms passed", ylim=(0, ROOMS + 0.2))
plt.show()

# %%
# A walk as text, as the environment received it:

for messages in buffer.storage.episode(0)["text"]:
    for message in messages:
        print(f"{message['role']:>9}: {message['content']}")

collector.shutdown()
engine.close()

# %%
# ``examples/guess_number.py`` runs the same loop on a harder game, with a known optimum, a warm
# start and a report.
