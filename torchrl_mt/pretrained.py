"""A pretrained chat model, with settings for training it that leave its abilities intact.

One place decides what suits the model at hand, and says so in one line: LoRA or all weights, the
learning rate and the number type.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from torchrl_mt._hosts.peft import has_adapter_layers, is_peft_model
from torchrl_mt.checks import check_positive_finite, import_extra
from torchrl_mt.scoring.forward import run_model, scoring_mode
from torchrl_mt.scoring.token_log_probs import log_probs_at

__all__ = ["Pretrained", "learning_rate", "load"]

PLAIN_TEXT = (
    "The sun rises in the east and sets in the west, and people have told the time by it for ages.",
    "Water boils at one hundred degrees Celsius at sea level, and at a lower temperature on mountains.",
    "She opened the old book, found the letter between its pages, and read it slowly by the window.",
)
"""Sentences that every language model finds likely."""


@dataclass(frozen=True)
class Pretrained:
    """A model that is ready to be trained.

    Args:
        model: The model to sample from and to train, in evaluation mode; with LoRA a ``PeftModel``.
        tokenizer: Its tokenizer.
        optimizer: AdamW over the parameters that are trained.
        name: The model's name or path.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    name: str

    def __str__(self) -> str:
        """Say in one line what is trained, and how."""
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        total = sum(p.numel() for p in self.model.parameters())
        first = next(self.model.parameters())
        what = "LoRA" if is_peft_model(self.model) else "all weights"
        return (
            f"{self.name}: trains {what}, {trained / 1e6:.1f} of {total / 1e6:.1f} million parameters, "
            f"lr {self.optimizer.param_groups[0]['lr']:g}, {str(first.dtype).removeprefix('torch.')} "
            f"on {first.device}"
        )

    def plain_text_nll(self) -> float:
        """Measure how likely a few plain sentences are, to see whether training damages the model.

        Returns:
            The negative log-likelihood, in nats per token. It should stay within a few tenths; a rise
            by 1 or more means that training destroys the model.

        Raises:
            ValueError: If the tokenizer lacks a word, as tiny ones do.
        """
        nll, count = 0.0, 0
        with scoring_mode(self.model):
            for text in PLAIN_TEXT:
                try:
                    ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
                except Exception as error:  # tokenizers raises no more special one
                    raise ValueError(f"{self.name} has no tokens for {text!r}: {error}") from error
                output = run_model(
                    self.model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                )
                targets = ids[0, 1:].to(output.logits.device)
                places = torch.arange(len(targets), device=targets.device)
                nll -= float(log_probs_at(output.logits[0], places, targets)[0].sum())
                count += targets.numel()
        return nll / count


def learning_rate(parameters: int, *, lora: bool) -> float:
    """Choose a learning rate for AdamW by the size of a model.

    Args:
        parameters: Number of parameters of the whole model.
        lora: Whether LoRA adapters are trained, with ``lora_alpha`` twice the rank, or all weights.

    Returns:
        With LoRA 3e-4 up to a billion parameters, 1e-4 up to ten billion and 5e-5 above; for all
        weights 1e-5, 3e-6 and 1e-6.

    Examples:
        >>> learning_rate(135_000_000, lora=True), learning_rate(7_000_000_000, lora=False)
        (0.0003, 3e-06)
    """
    size = 0 if parameters < 1e9 else 1 if parameters < 1e10 else 2
    return ((3e-4, 1e-4, 5e-5) if lora else (1e-5, 3e-6, 1e-6))[size]


def load(
    name_or_model: str | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    lora: bool | Any = True,
    lr: float | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> Pretrained:
    """Load a chat model for training, and print what is trained, and how.

    Args:
        name_or_model: A name on the Hugging Face Hub, a folder, or a model that is loaded already. A
            folder may hold PEFT's adapters alone: their training goes on.
        tokenizer: The model's tokenizer; by default it is loaded by the model's name.
        lora: Train LoRA adapters on all linear layers (rank 16, ``lora_alpha`` 32, no dropout), which
            keeps what the model knows. Or a ``peft.LoraConfig``, or a mapping such as ``{"r": 8}``; or
            ``False``, to train all weights. A model that has adapters keeps its own.
        lr: Learning rate; by default :func:`learning_rate`.
        device: Where the model goes; by default it stays where it was loaded, as it must with
            ``device_map`` or quantised weights.
        dtype: Number type of the weights. Default: bfloat16 with LoRA on CUDA, otherwise float32, as
            small steps are lost in lower precision. Adapters are always float32. A model that is loaded
            already keeps its own.
        **kwargs: For ``AutoModelForCausalLM.from_pretrained``, such as ``device_map`` or ``revision``.

    Raises:
        ImportError: If LoRA is asked for and ``peft`` is not installed.
        TypeError: If arguments for loading are given with a loaded model, or a model that has no name
            comes without its tokenizer.
        ValueError: If the tokenizer has no chat template or no end-of-turn token, ``lr`` is not
            positive, nothing would be trained, or a model that is no ``PeftModel`` has adapters.

    Examples:
        >>> import torchrl_mt as mt
        >>> model, tokenizer = mt.testing.tiny_chat_model("yes no")
        >>> policy = mt.pretrained.load(model, tokenizer, lora=False)  # doctest: +ELLIPSIS
        Llama...: trains all weights, 0.1 of 0.1 million parameters, lr 1e-05, float32 on cpu
    """
    if lr is not None:
        check_positive_finite("lr", lr)
    if isinstance(name_or_model, str):
        name: str = name_or_model
        adapters = Path(name, "adapter_config.json").is_file()
        if dtype is None:
            on_cuda = device is not None and torch.device(device).type == "cuda"
            dtype = torch.bfloat16 if (lora or adapters) and on_cuda else torch.float32
        model: Any = (_load_adapters if adapters else _load_weights)(name, dtype=dtype, **kwargs)
    else:
        model = name_or_model
        name = getattr(model.config, "name_or_path", "") or type(model).__name__
        if dtype is not None or kwargs:
            wrong = next(iter(kwargs), "dtype")
            raise TypeError(
                f"{wrong} is for loading a model by its name, got a {type(model).__name__}."
            )
    if tokenizer is None:
        if not isinstance(name_or_model, str) and name == type(model).__name__:
            raise TypeError(f"tokenizer must be given with a {name} that has no name, got None.")
        has_own = Path(name, "tokenizer_config.json").is_file() or not is_peft_model(model)
        tokenizer = AutoTokenizer.from_pretrained(name if has_own else model.config.name_or_path)
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {name} must have a chat template, got none: take a model that is tuned "
            "for chat (its name often ends in Instruct), or set tokenizer.chat_template."
        )
    if tokenizer.eos_token is None:
        raise ValueError(
            f"the tokenizer of {name} must have an end-of-turn token, got none: set tokenizer.eos_token."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if device is not None:
        model.to(device)
    if not is_peft_model(model):
        if has_adapter_layers(model):
            raise ValueError(
                f"{name} must have no adapters or be a PeftModel, got adapters in a "
                f"{type(model).__name__}: take PeftModel.from_pretrained(..., is_trainable=True)."
            )
        if lora:
            model = _with_lora(model, lora)
    model.eval()
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError(
            f"{name} must have a parameter with requires_grad, got none: nothing would be trained."
        )
    size = sum(p.numel() for p in model.parameters())
    rate = learning_rate(size, lora=is_peft_model(model)) if lr is None else lr
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    policy = Pretrained(model, tokenizer, optimizer, name)
    print(policy)
    return policy


def _load_weights(name: str, **kwargs: Any) -> Any:
    """Load a model by its name."""
    try:
        return AutoModelForCausalLM.from_pretrained(name, **kwargs)
    except (OSError, HFValidationError) as error:  # the oldest transformers raises the second
        if Path(name).is_dir():
            raise
        raise OSError(f"there is no folder {name!r}, and the Hub gave no model: {error}") from error


def _load_adapters(folder: str, **kwargs: Any) -> Any:
    """Load a folder of adapters, and their base model."""
    peft = import_extra("peft", "lora")
    base = peft.PeftConfig.from_pretrained(folder).base_model_name_or_path
    return peft.PeftModel.from_pretrained(_load_weights(base, **kwargs), folder, is_trainable=True)


def _with_lora(model: nn.Module, config: Any) -> Any:
    """Put adapters into the linear layers."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError(
            "LoRA needs peft: pip install 'torchrl-mt[lora]'; lora=False trains all weights."
        ) from error
    if config is True or isinstance(config, Mapping):
        settings: dict[str, Any] = {"r": 16, "lora_dropout": 0.0, "target_modules": "all-linear"}
        settings |= {} if config is True else config
        settings = {"lora_alpha": 2 * settings["r"], "task_type": "CAUSAL_LM", **settings}
        config = LoraConfig(**settings)
    with warnings.catch_warnings():  # PEFT asks for an attribute that transformers deprecates
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        return get_peft_model(model, config)
