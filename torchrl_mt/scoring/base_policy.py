"""The base model of an actor's PEFT adapters, scored with the actor's own parameters.

The actor is left as it was: its adapters are on again afterwards, and the same parameters are trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from torchrl_mt._hosts.peft import adapter_off, is_peft_model
from torchrl_mt.scoring.forward import scoring_mode, unwrapped
from torchrl_mt.scoring.log_probs import causal_lm


@contextmanager
def base_policy(actor: nn.Module) -> Iterator[None]:
    """Turn an actor into the base model of its PEFT adapters.

    Other threads wait to score with the actor; direct calls of it do not wait.

    Args:
        actor: A ``PeftModel`` or a wrapper around one.

    Raises:
        ValueError: If the actor has no PEFT adapters; if they are of the prompt, or merged; or if other
            parameters than the adapters' are trained.
    """
    model = unwrapped(causal_lm(actor))
    if not is_peft_model(model):
        raise ValueError(
            "ref='base' needs an actor with PEFT adapters (peft.get_peft_model; pip install "
            f"'torchrl-mt[lora]'), got {type(model).__name__}: without them, give a copy of the model "
            "that training starts from."
        )
    with scoring_mode(model), adapter_off(model):
        yield
