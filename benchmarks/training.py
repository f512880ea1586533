"""Seconds of one update, of playing and training together, beside TRL and TorchRL.

Every contender plays the same dialogues of fixed lengths with the same model, in groups of eight, and
makes one GRPO step of AdamW on the batch. TRL plays in its ``rollout_func``: in every turn one
``generate()`` of all dialogues in lockstep, which is what suits fixed lengths best. TorchRL's
``LLMCollector`` plays with tokens, which costs it least, and its ``GRPOLoss`` is given whole dialogues
as rows. Contenders take turns, update by update; medians are reported. TRL is needed: pip install trl.

    OMP_NUM_THREADS=1 python benchmarks/training.py [--model HuggingFaceTB/SmolLM2-135M-Instruct]
"""

from __future__ import annotations

import argparse
import gc
import logging
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from rollout_model import MODELS, WORDS, Dialogue, FixedLength, Load, forgiving, host_collector
from tables import Part, Row, show
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss

from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import TextStep
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, Passes
from torchrl_mt.pretrained import load as load_pretrained
from torchrl_mt.testing import tiny_chat_model
from torchrl_mt.transforms import MergeTurns

GROUP, LR = 8, 1e-5


def score(text: str) -> float:
    """Share of words that have an even number."""
    words = text.split()
    return sum(word[-1:] in "02468" for word in words) / max(1, len(words))


class Rewarded(Dialogue):
    """Rewards each answer."""

    def reset(self, data: Any = None) -> list[dict[str, str]]:
        return super().reset({"seed": data["seed"]})

    def step(self, response: str) -> TextStep:
        answer = super().step(response)
        return TextStep(answer.messages, reward=score(response), done=answer.done)


def ours(model: Any, tokenizer: Any, load: Load, packed: Any) -> Iterator[None]:
    """An update of this package with every step."""
    engine = TransformersEngine(model, tokenizer, seed=0)
    groups = load.episodes // GROUP
    passes = Passes(packed=packed)
    maker = ExperienceMaker(model, advantage="grpo", passes=passes)
    loss_module = MultiTurnLoss(model, passes=passes)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=LR)
    with MultiTurnCollector(
        Rewarded(load),
        FixedLength(engine, load.response),
        [{"seed": i} for i in range(groups)],
        group_size=GROUP,
        episodes_per_batch=load.episodes,
        limits=Limits(max_turns=load.turns),
        postproc=MergeTurns(),
    ) as collector:
        for rows in collector:
            loss_module(maker(rows))["loss_objective"].backward()
            optimizer.step()
            optimizer.zero_grad()
            collector.update_policy_weights_(model)
            yield
    engine.close()


class Lockstep:
    """TRL's ``rollout_func``: all dialogues of a batch, turn by turn."""

    def __init__(self, tokenizer: Any, load: Load) -> None:
        self.tokenizer, self.load = tokenizer, load

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        load, n = self.load, len(prompts)
        ids = [self._said(int(prompt), 0) for prompt in prompts]
        begin = [len(row) for row in ids]
        masks: list[list[int]] = [[] for _ in ids]
        log_probs: list[list[float]] = [[] for _ in ids]
        rewards = [0.0] * n
        model = trainer.accelerator.unwrap_model(trainer.model)
        for turn in range(load.turns):
            for i, prompt in enumerate(prompts if turn else ()):
                new = self._said(int(prompt), turn)
                ids[i] += new
                masks[i] += [0] * len(new)
                log_probs[i] += [0.0] * len(new)
            padded = self.tokenizer.pad(
                {"input_ids": ids}, padding_side="left", return_tensors="pt"
            )
            with torch.no_grad():
                out = model.generate(
                    **padded.to(model.device),
                    max_new_tokens=load.response,
                    do_sample=True,
                    top_k=0,
                    output_scores=True,
                    return_dict_in_generate=True,
                    eos_token_id=None,
                    pad_token_id=self.tokenizer.pad_token_id,
                )
            sampled: Tensor = out.sequences[:, -load.response :]
            scores = torch.stack(out.scores, 1).log_softmax(-1)
            chosen = scores.gather(-1, sampled[..., None])[..., 0].tolist()
            texts = self.tokenizer.batch_decode(sampled)
            for i, tokens in enumerate(sampled.tolist()):
                ids[i] += tokens
                masks[i] += [1] * len(tokens)
                log_probs[i] += chosen[i]
                rewards[i] += score(texts[i])
        return {
            "prompt_ids": [row[:k] for row, k in zip(ids, begin, strict=True)],
            "completion_ids": [row[k:] for row, k in zip(ids, begin, strict=True)],
            "logprobs": log_probs,
            "env_mask": masks,
            "total": rewards,
        }

    def _said(self, episode: int, turn: int) -> list[int]:
        message = {"role": "user", "content": self.load.said(episode, turn)}
        return list(
            self.tokenizer.apply_chat_template(
                [message], add_generation_prompt=True, return_dict=False
            )
        )


def trl(model: nn.Module, tokenizer: Any, load: Load) -> Iterator[None]:
    """An update of TRL with every step. It trains in a thread of its own that waits in between."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    go: queue.Queue[bool] = queue.Queue()
    done: queue.Queue[bool] = queue.Queue()

    class TakeTurns(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            done.put(True)
            control.should_training_stop = not go.get()

    groups = load.episodes // GROUP
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder,
            per_device_train_batch_size=load.episodes,
            num_generations=GROUP,
            max_completion_length=10**6,
            max_steps=10**6,
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            beta=0.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=next(model.parameters()).device.type == "cpu",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            cast(Any, model),
            reward_funcs=lambda total, **_: total,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(groups)]}),
            processing_class=tokenizer,
            rollout_func=Lockstep(tokenizer, load),
            callbacks=[TakeTurns()],
        )
        thread = threading.Thread(target=trainer.train, daemon=True)
        thread.start()
        while True:
            done.get()
            yield
            go.put(True)


def torchrl(model: Any, tokenizer: Any, load: Load) -> Iterator[None]:
    """An update of TorchRL's own parts with every step."""
    tokenizer = forgiving(tokenizer)
    model.generation_config.eos_token_id = None  # every answer has its full length
    actor = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False)
    loss_module = GRPOLoss(actor, masking_strategy="rlhf", entropy_bonus=False)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=LR)
    for batch in host_collector(model, tokenizer, load):
        rows = dialogues(batch.reshape(load.episodes, load.turns), tokenizer)
        loss_module(rows).loss_objective.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def dialogues(steps: TensorDictBase, tokenizer: Any) -> TensorDict:
    """Rows of whole dialogues, of steps ``[episodes, turns]``; prompts of a turn are equally long."""
    full = torch.stack(steps[:, -1].get(("tokens", "full"), as_list=True))
    log_probs, sampled = torch.zeros(full.shape), torch.zeros(full.shape, dtype=torch.bool)
    total = torch.zeros(len(full))
    for turn in steps.unbind(1):
        answers = turn["tokens", "response"]
        begin = len(turn[0]["tokens", "prompt"])
        where = slice(begin, begin + answers.shape[1])
        log_probs[:, where], sampled[:, where] = turn["log_probs", "response"], True
        total += torch.tensor([score(text) for text in tokenizer.batch_decode(answers)])
    groups = total.view(-1, GROUP)
    advantage = (groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-4)
    masks = {"all_attention_mask": torch.ones_like(sampled), "all_assistant_mask": sampled}
    return TensorDict(
        {
            "tokens": {"full": full},
            "masks": masks,
            "log_probs": {"full": log_probs},
            "advantage": advantage.reshape(-1, 1, 1).expand(*full.shape, 1),
        },
        [len(full)],
    )


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """Rows of the table: each model, and each contender with it."""
    loads: list[tuple[str, dict[str, Any], Load]] = []
    if args.model is None:
        loads.append(("2 × 64, 64 × 5 turns", MODELS[0][1], Load(64, 5, 2, 4)))
        loads.append(("8 × 512, 16 × 5 turns", MODELS[1][1], Load(16, 5, 8, 8)))
    else:
        loads.append((f"{args.model}, 8 × 3 turns", {}, Load(8, 3, 16, 16)))
    for title, config, load in loads:
        yield title, "", "", ""

        def fresh(config: dict[str, Any] = config) -> tuple[Any, Any]:
            torch.manual_seed(0)
            if args.model is not None:
                policy = load_pretrained(args.model, device=args.device)
                return policy.model, policy.tokenizer
            model, tokenizer = tiny_chat_model(WORDS, max_position_embeddings=1024, **config)
            return cast(Any, model).to(args.device), tokenizer

        runs = {
            "  TRL, rollout_func in lockstep": trl(*fresh(), load),
            "  torchrl_mt": ours(*fresh(), load, False),
            '  torchrl_mt, packed="tree"': ours(*fresh(), load, "tree"),
        }
        if args.model is None:  # whose tokenizer has all words of the dialogues
            runs["  TorchRL, LLMCollector and GRPOLoss"] = torchrl(*fresh(), load)
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for update in range(args.updates + 2):
            for name, run in runs.items():
                clock, processor = time.perf_counter(), time.process_time()
                next(cast(Any, run))
                taken = time.perf_counter() - clock, time.process_time() - processor
                if update > 1:
                    seconds[name].append(taken)
        first = next(iter(seconds.values()))
        for name, taken in seconds.items():
            clock, processor = (statistics.median(x) for x in zip(*taken, strict=True))
            ratio = statistics.median(a[1] / b[1] for a, b in zip(first, taken, strict=True))
            yield name, f"{clock:.3f}", f"{processor:.3f}", f"{ratio:.2f}×"
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--model", help="a pretrained model, trained with LoRA, instead of small ones"
    )
    parser.add_argument("--updates", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rst", type=Path, help="also write the table for the documentation here")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    header = ("an update", "s", "CPU s", "faster")
    show([Part(header, (55, 15, 15, 15), rows)], args, args.rst)


if __name__ == "__main__":
    main()
