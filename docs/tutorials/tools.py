"""
Train an agent that uses tools
==============================

An agent is a program that speaks to an OpenAI endpoint (:doc:`/agents`). This one answers questions
about a fruit shop with the plain ``openai`` package and two tools. It knows nothing of reinforcement
learning: the collector gives it an address, samples the replies, and records the tokens. The model
learns which tool to call, and for which fruit.
"""

import json
import random

import matplotlib.pyplot as plt
import openai
import torch
from torchrl.data import ReplayBuffer

from torchrl_mt.chat import ParsedReply
from torchrl_mt.collectors import AgentOptions, CollectorOptions, Limits, MultiTurnCollector
from torchrl_mt.data import EpisodeSampler, EpisodeStorage, EpisodeWriter
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss
from torchrl_mt.testing import tiny_chat_model
from torchrl_mt.transforms import DiscountedReturn, MergeTurns

EPISODES, UPDATES = 128, 26

torch.manual_seed(0)
torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other

# %%
# The agent
# ---------
#
# An item of the data is a question, and what the shop has. The agent asks the model, runs the tool
# that it calls, and asks again. Its reward is whether the answer is right. It would run as it stands
# against any other OpenAI endpoint.

TOOLS = ["price", "stock"]
FRUITS = ["apple", "pear", "plum"]
NUMBERS = ["1", "2", "3", "4", "5", "6", "7", "8"]
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": tool,
            "description": f"The {tool} of a fruit.",
            "parameters": {"type": "object", "properties": {"fruit": {"enum": FRUITS}}},
        },
    }
    for tool in TOOLS
]


class Clerk:
    async def run(self, data, *, base_url, api_key, http_client):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages = [{"role": "user", "content": data["question"]}]
        for _ in range(2):
            reply = await client.chat.completions.create(
                model="policy", messages=messages, tools=SCHEMAS
            )
            message = reply.choices[0].message
            if not message.tool_calls:
                return float(message.content == data["answer"])
            messages.append(message)
            for call in message.tool_calls:
                fruit = json.loads(call.function.arguments)["fruit"]
                result = data["shop"][call.function.name][fruit]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return 0.0


def questions(seed=0):
    rng = random.Random(seed)
    while True:
        shop = {tool: {fruit: rng.choice(NUMBERS) for fruit in FRUITS} for tool in TOOLS}
        tool, fruit = rng.choice(TOOLS), rng.choice(FRUITS)
        yield {"question": f"{tool} of {fruit}", "shop": shop, "answer": shop[tool][fruit]}


# %%
# The model
# ---------
#
# To keep this page fast, we use a tiny model with random weights. Each of its tokens is a word. It
# has no notation for tool calls, so we invent one, ``call price apple``, and a ``tool_parser`` that
# reads it. A real model needs neither: the notation of its family is known.

model, tokenizer = tiny_chat_model(["of", "call", *TOOLS, *FRUITS, *NUMBERS], extra_roles=["tool"])


def parse(text):
    words = text.split()
    if len(words) == 3 and words[0] == "call" and words[1] in TOOLS and words[2] in FRUITS:
        function = {"name": words[1], "arguments": {"fruit": words[2]}}
        return ParsedReply("", tool_calls=[{"type": "function", "function": function}])
    return ParsedReply(text)


# %%
# Random weights hardly ever write a call, and where no episode has a reward, there is nothing to
# learn from. A pretrained model can write calls. So this model first learns the notation, by
# imitation: to call *any* tool for *any* fruit, whatever the question is, and to answer with the
# result.


def demonstrations(rng, number=64):
    for _ in range(number):
        asked, called = ((rng.choice(TOOLS), rng.choice(FRUITS)) for _ in range(2))
        result = rng.choice(NUMBERS)
        yield [
            {"role": "user", "content": "{} of {}".format(*asked)},
            {"role": "assistant", "content": "call {} {}".format(*called)},
            {"role": "tool", "content": result},
            {"role": "assistant", "content": result},
        ]


rng = random.Random(0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
for _ in range(100):
    texts = tokenizer.apply_chat_template([*demonstrations(rng)], tokenize=False)
    tokens = tokenizer(texts, return_tensors="pt")["input_ids"]
    labels = torch.full_like(tokens, -100)
    for said in (
        slice(6, 10),
        slice(14, 16),
    ):  # what the assistant says, with its end-of-turn token
        labels[:, said] = tokens[:, said]
    model(input_ids=tokens, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

# %%
# Collecting
# ----------
#
# The agent takes the place of an environment; everything else is as in :doc:`the first tutorial
# </auto_tutorials/agent>`. The collector starts a server for the episodes and stops it in the end.

engine = TransformersEngine(model, tokenizer)
buffer = ReplayBuffer(
    storage=EpisodeStorage(max_steps=EPISODES * 2),
    writer=EpisodeWriter(transform=DiscountedReturn(1.0)),
    sampler=EpisodeSampler(replacement=False),
    transform=MergeTurns(pad_token_id=tokenizer.pad_token_id),
    batch_size=EPISODES,
)
collector = MultiTurnCollector(
    Clerk(),
    engine,
    questions(),
    episodes_per_batch=EPISODES,
    limits=Limits(max_response_tokens=5),
    options=CollectorOptions(agents=AgentOptions(tool_parser=parse)),
    replay_buffer=buffer,
)
batches = iter(collector)
next(batches)
print(collector.stats())

# %%
# Each call of the agent is a turn. The second prompt is the first one, the call as it was sampled,
# and the result. So an episode is one row, and there are no forks.


def show(episode):
    prompts = episode.get(("tokens", "prompt"), as_list=True)
    responses = episode.get(("tokens", "response"), as_list=True)
    for prompt, response, reward in zip(prompts, responses, episode["next", "reward"], strict=True):
        print("prompt  ", tokenizer.decode(prompt))
        print("response", tokenizer.decode(response))
        print("reward  ", reward.item())


show(buffer.storage.episode(0))
print("forks:", collector.stats()["forks"])

# %%
# Learning
# --------
#
# The reward comes with the last turn. ``"turn"`` compares the return of each turn with that of the
# same turn in the other episodes, so the call is credited with the answer that it led to.

maker = ExperienceMaker(model, advantage="turn", gamma=1.0)
loss_module = MultiTurnLoss(model, objective="ppo", clip_epsilon=0.2, entropy_coef=0.003)
optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, weight_decay=0.0)
rewards = []
for update in range(UPDATES):
    buffer.empty()
    next(batches)
    rewards.append(buffer.storage[:]["next", "reward"].sum().item() / EPISODES)
    rows = maker(buffer.sample())
    for _ in range(2):
        for shard in rows[torch.randperm(len(rows))].split(EPISODES // 2):
            losses = loss_module(shard)
            (losses["loss_objective"] + losses["loss_entropy"]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    collector.update_policy_weights_(model)
    if update % 4 == 0 or update == UPDATES - 1:
        print(f"update {update:2d}: {rewards[-1]:.0%} of the answers are right")

# %%
# The learning curve. With a tool and a fruit at random, one answer in six is right, and some others
# by chance:

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.plot(rewards)
axes.axhline(1 / 6 + 5 / 6 / len(NUMBERS), color="grey", linestyle="--", label="any call")
axes.set(xlabel="update", ylabel="right answers", ylim=(0, 1.05))
axes.legend(loc="lower right")
plt.show()

# %%
# The model now calls the tool that it was asked about:

show(buffer.storage.episode(0))
collector.shutdown()
engine.close()

# %%
# :doc:`/agents` has other forms of agents, frameworks, and what a request may have.
