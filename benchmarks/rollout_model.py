"""Cost of the engine with a real model: its cache across turns, and tokens per second beside TorchRL.

Every episode is a dialogue of fixed lengths, so all contenders sample equally many tokens from equally
long prompts. Runs alternate, and medians of wall and CPU time are reported. A prompt token is new if it
did not go through the model before; the last token of an answer did not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.envs import StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from transformers import PreTrainedTokenizerFast

from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.engines import Completion, TransformersEngine
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.testing import tiny_chat_model

__all__ = ["Load", "rows"]

WORDS = [f"w{i}" for i in range(1000)]


@dataclass(frozen=True)
class Load:
    """What is played."""

    episodes: int = 64
    """At once, and in a batch."""
    turns: int = 8
    """Of every episode."""
    response: int = 16
    """Tokens that the model samples in a turn."""
    answer: int = 16
    """Words that the environment says in a turn."""

    def said(self, episode: int, turn: int) -> str:
        """What the environment says; every episode begins in its own way."""
        start = (episode * 37 + turn * 101) % (len(WORDS) - self.answer)
        return " ".join(WORDS[start : start + self.answer])


@dataclass(frozen=True)
class Figures:
    """Cost of a batch."""

    seconds: float
    """On the clock."""
    processor: float
    """Seconds of the processor, over all threads."""
    tokens: int
    """Sampled."""
    prompt_tokens: int
    """Of all turns' prompts."""
    new: int
    """Tokens of prompts that the model had not been given: after an answer, its last token and what the
    environment says."""
    prefill: int | None = None
    """Prompt tokens that went through the model; ``None`` if unknown."""


class Dialogue(TextEnv):
    """Says some fixed words in every turn."""

    inline = True

    def __init__(self, load: Load) -> None:
        self.load = load

    def reset(self, data: Any = None) -> list[dict[str, str]]:
        self.episode, self.turn = data["seed"] % self.load.episodes, 0
        return [{"role": "user", "content": self.load.said(self.episode, 0)}]

    def step(self, response: str) -> TextStep:
        self.turn += 1
        words = self.load.said(self.episode, self.turn)
        return TextStep([{"role": "user", "content": words}], done=self.turn == self.load.turns)


class FixedLength:
    """An engine whose answers all have one length and count as whole."""

    def __init__(self, engine: TransformersEngine, length: int) -> None:
        self.engine, self.length = engine, length
        self.tokenizer, self.update_weights = engine.tokenizer, engine.update_weights
        self.close = engine.close

    @property
    def version(self) -> int:
        return self.engine.version

    async def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None, **sampling: Any
    ) -> Completion:
        answer = await self.engine.generate(
            prompt_ids, max_new_tokens=self.length, stop_token_ids=(), **sampling
        )
        return replace(answer, finish_reason="stop")


class Say(Transform):
    """The same words for TorchRL's environment, in tokens: that costs its collector least."""

    def __init__(self, load: Load, tokenizer: Any) -> None:
        super().__init__()
        self.load, self.tokenizer, self.turn = load, tokenizer, 0

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        self.turn = 0
        return self._say(tensordict_reset, [torch.zeros(0, dtype=torch.int64)] * self.load.episodes)

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        self.turn += 1
        return self._say(next_tensordict, tensordict.get(("tokens", "full"), as_list=True))

    def _say(self, tensordict: Any, before: list[torch.Tensor]) -> Any:
        """Write prompts: what was said before and, behind it, what the environment says now."""
        end = self.tokenizer.eos_token
        for episode, ids in enumerate(before):
            words = f"<user> {self.load.said(episode, self.turn)} {end} <assistant>"
            words = words if self.turn == 0 else f"{end} {words}"  # no answer ends by itself
            new = self.tokenizer.encode(words, add_special_tokens=False, return_tensors="pt")[0]
            tensordict[episode].set(("tokens", "prompt"), torch.cat([ids, new]))
        return tensordict


def ours(
    model: Any, tokenizer: Any, load: Load, *, fresh: bool = True, **engine: Any
) -> Generator[Figures, None, None]:
    """Batches of ``MultiTurnCollector`` with a ``TransformersEngine``.

    Args:
        model: samples.
        tokenizer: of the model.
        load: what is played.
        fresh: forget the cache before every batch, as training between two batches does.
        **engine: arguments of the engine.
    """
    sampler = TransformersEngine(model, tokenizer, **engine)
    with MultiTurnCollector(
        Dialogue(load),
        FixedLength(sampler, load.response),
        episodes_per_batch=load.episodes,
        limits=Limits(max_turns=load.turns),
    ) as collector:
        batches, before = iter(collector), sampler.stats()
        try:
            while True:
                if fresh:
                    sampler.update_weights()
                batch, seconds, processor = _timed(lambda: next(batches))
                stats = sampler.stats()
                prefill = stats["prefill_tokens"] - before["prefill_tokens"]
                before = stats
                yield Figures(seconds, processor, *_counts(batch), prefill)
        finally:
            sampler.close()


def host_collector(model: Any, tokenizer: Any, load: Load) -> LLMCollector:
    """TorchRL's collector with a ``TransformersWrapper``, in one environment of all dialogues."""
    questions: DataLoader[Any] = DataLoader(
        cast(Any, [load.said(i, 0) for i in range(load.episodes)]),
        batch_size=load.episodes,
        collate_fn=lambda queries: TensorDict({"query": queries}, [len(queries)]),
    )
    env = ChatEnv.from_dataloader(
        questions, batch_size=(load.episodes,), tokenizer=tokenizer, input_mode="tokens"
    )
    env = env.append_transform(Say(load, tokenizer))
    env = env.append_transform(StepCounter(max_steps=load.turns))
    # The wrapper leaves out whatever looks like padding, also if it was sampled.
    model.generation_config.suppress_tokens = tokenizer.all_special_ids
    policy = TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode="tokens",
        pad_output=False,
        return_log_probs=True,
        generate_kwargs={
            "max_new_tokens": load.response,
            "do_sample": True,
            "top_k": len(tokenizer),  # all of them
        },
    )
    return LLMCollector(
        env,
        # The mask of the turn before would be taken for this turn's.
        policy=lambda tensordict: policy(tensordict.exclude("masks")),
        dialog_turns_per_batch=load.episodes * load.turns,
    )


def host(model: Any, tokenizer: Any, load: Load) -> Generator[Figures, None, None]:
    """Batches of TorchRL's collector."""
    collector = host_collector(model, tokenizer, load)
    batches = iter(collector)
    try:
        while True:
            batch, seconds, processor = _timed(lambda: next(batches))
            yield Figures(seconds, processor, *_counts(batch.reshape(-1)))
    finally:
        collector.shutdown()


def forgiving(tokenizer: Any) -> Any:
    """A tokenizer of the same words to which any other is padding.

    TorchRL's environment renders what was said with a template of its own, whose words nobody reads.
    """
    backend = Tokenizer(models.WordLevel(tokenizer.get_vocab(), tokenizer.pad_token))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    same: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=tokenizer.pad_token,
        eos_token=tokenizer.eos_token,
        additional_special_tokens=["<user>", "<assistant>"],
    )
    same.chat_template = tokenizer.chat_template
    return same


def _timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """The result of ``work`` and its cost."""
    clock, processor = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - clock, time.process_time() - processor


def _counts(batch: TensorDict) -> tuple[int, int, int]:
    """Sampled tokens, tokens of prompts, and those of them that are new, of whole episodes."""
    prompts = [len(ids) for ids in batch.get(("tokens", "prompt"), as_list=True)]
    answers = [len(ids) for ids in batch.get(("tokens", "response"), as_list=True)]
    ends = batch["next", "done"].flatten().tolist()
    new, known = 0, 0
    for prompt, answer, done in zip(prompts, answers, ends, strict=True):
        new += prompt - known
        known = 0 if done else prompt + answer - 1
    return sum(answers), sum(prompts), new


def compare(
    runs: dict[str, Generator[Figures, None, None]], repeats: int
) -> dict[str, list[Figures]]:
    """Take batches of each in turn, after one that allocates."""
    figures: dict[str, list[Figures]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, batches in runs.items():
            taken = next(batches)
            if repeat:
                figures[name].append(taken)
    return figures


MODELS: tuple[tuple[str, dict[str, Any], Load], ...] = (
    ("2 layers of width 64, 64 dialogues of 8 turns", {}, Load()),
    (
        "8 layers of width 512, 16 dialogues of 4 turns",
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "initializer_range": 0.02,
        },
        Load(episodes=16, turns=4),
    ),
)


def rows(repeats: int, device: str) -> Iterator[tuple[str, ...]]:
    """The table's rows: each model, and each contender with it."""
    for title, config, load in MODELS:
        yield (title, *[""] * 5)
        yield from contenders(repeats, device, config, load)


def contenders(
    repeats: int, device: str, config: dict[str, Any], load: Load
) -> Iterator[tuple[str, ...]]:
    """One row for each contender; ratios are to TorchRL's, turn by turn, medians."""
    longest = load.turns * (load.response + load.answer + 8)
    model, tokenizer = tiny_chat_model(WORDS, max_position_embeddings=longest, **config)
    cast(Any, model).to(device)
    model.generation_config.eos_token_id = None  # every answer has its full length
    runs = {
        "  LLMCollector, TransformersWrapper": host(model, forgiving(tokenizer), load),
        "  MultiTurnCollector": ours(model, tokenizer, load),
        "  MultiTurnCollector, nothing shared": ours(model, tokenizer, load, prefix_sharing=False),
    }
    figures = compare(runs, repeats)
    for batches in runs.values():
        batches.close()
    first = next(iter(figures.values()))
    for name, taken in figures.items():
        seconds = statistics.median(one.seconds for one in taken)
        pairs = list(zip(first, taken, strict=True))
        faster = statistics.median(a.seconds / b.seconds for a, b in pairs)
        less = statistics.median(a.processor / b.processor for a, b in pairs)
        one = taken[0]
        # TorchRL's collector gives every turn's whole prompt to the model.
        prefill = one.prompt_tokens if one.prefill is None else one.prefill
        yield (
            name,
            f"{seconds:.2f}",
            f"{one.tokens / seconds:,.0f}",
            f"{faster:.2f}×",
            f"{less:.2f}×",
            f"{prefill / one.new:.2f}",
        )
