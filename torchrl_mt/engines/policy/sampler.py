"""Batched sampling with TorchRL policies: prompts in, responses out exactly as sampled.

This module adds and removes padding. No sampled token is lost to it, even if the padding token itself
was sampled. A policy that changes its prompt raises an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import nn
from torchrl.modules.llm import LLMWrapperBase, SGLangWrapper, TransformersWrapper, vLLMWrapper
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteriaList

from torchrl_mt._hosts.torchrl import min_batch_size
from torchrl_mt.engines.model_facts import input_device
from torchrl_mt.engines.sampling import Sampling
from torchrl_mt.engines.sampling_params import altering_arguments
from torchrl_mt.engines.stop_strings import StopStrings

__all__ = ["Drawn", "PolicySampler", "generate_kwargs_of", "require_own_distribution"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One response, as sampled."""

    token_ids: list[int]
    """Tokens up to the limit, or up to and including the first stop token, or the token that completes
    a stop string."""
    reported: list[float] | None
    """Log-probability of each token as the policy reports it; ``None`` if it reports none."""
    stop_string: str | None = None
    """The stop string that ended it."""


class PolicySampler:
    """Samples a batch of responses with a TorchRL policy.

    A ``TransformersWrapper`` is rebuilt around ``model`` for tokens in and out and padded output: its
    unpadded output drops every sampled token that equals the padding token. Other policies are used as
    they are, in evaluation mode, and their responses are cut to the limit.

    Args:
        policy: the policy that samples.
        model: model of a ``TransformersWrapper``; not used for other policies.
        tokenizer: gives the padding token.
        stop_ids: tokens that end a response.
        closing: once set, a ``TransformersWrapper`` stops sampling early.

    Raises:
        TypeError: if ``policy`` is no policy.
        ValueError: if ``policy`` does not generate one response per prompt, from tokens.
    """

    def __init__(
        self,
        policy: Any,
        model: nn.Module | None,
        tokenizer: PreTrainedTokenizerBase | None,
        stop_ids: frozenset[int],
        closing: threading.Event,
    ) -> None:
        _require_policy(policy)
        self._stop_ids = stop_ids
        pad = getattr(tokenizer, "pad_token_id", None)
        self._pad_id: int = min(stop_ids) if pad is None else pad
        self.takes_arguments = isinstance(policy, TransformersWrapper)
        """Whether a call sets limit and sampling parameters; otherwise the policy has its own."""
        # These read prompts row by row and would read padding as part of the prompt.
        self._ragged = isinstance(policy, (vLLMWrapper, SGLangWrapper))
        if isinstance(policy, TransformersWrapper):
            assert model is not None
            policy = _rebuilt(policy, model, tokenizer, stop_ids, self._pad_id, closing)
            self._criteria = policy.generate_kwargs["stopping_criteria"]
        elif self._ragged and (policy.input_mode != "tokens" or policy.pad_output):
            policy = policy.get_new_version(
                input_mode="tokens",
                input_key=("tokens", "prompt"),
                pad_output=False,
                return_log_probs=True,
            )
        _require_tokens(policy)
        self._policy: Callable[[TensorDictBase], TensorDictBase] = policy
        self._tokens = getattr(policy, "tokens_key", "tokens")
        self._log_probs = getattr(policy, "log_probs_key", "log_probs")

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        params: Sampling,
        stops: Sequence[StopStrings | None],
    ) -> list[Drawn]:
        """Sample a response to every prompt.

        Args:
            prompts: at least one token each.
            limits: maximum length of each response.
            params: sampling parameters, used if the policy takes arguments.
            stops: for each response its stop strings or ``None``, used if the policy takes arguments.

        Raises:
            RuntimeError: if the policy does not return one response to each of the prompts.
        """
        if self.takes_arguments:
            # The rebuilt policy is private, so its arguments may be changed.
            own: dict[str, Any] = self._policy.generate_kwargs  # type: ignore[attr-defined]
            own.update({"max_new_tokens": max(limits), **_hf_kwargs(params)})
            strings = [_Strings(stops, self._stop_ids)] if any(stops) else []
            own["stopping_criteria"] = StoppingCriteriaList([*self._criteria, *strings])
        batch = self._batch(prompts)
        with torch.no_grad(), _evaluating(self._policy):
            out = self._policy(batch)
        if not isinstance(out, TensorDictBase) or out.batch_size[:1] != batch.batch_size:
            raise RuntimeError(
                f"the policy must return a TensorDict with {len(prompts)} answers, got "
                f"{type(out).__name__} {tuple(getattr(out, 'batch_size', ()))}."
            )
        answers = zip(out.unbind(0), prompts, limits, stops, strict=True)
        return [self._read(*answer) for answer in answers]

    def _batch(self, prompts: Sequence[Sequence[int]]) -> TensorDictBase:
        """Prompts in the policy's format: rows, or a left-padded batch with its mask."""
        device = input_device(self._policy)
        rows = [torch.tensor(prompt, device=device) for prompt in prompts]
        if self._ragged:
            return lazy_stack([TensorDict({"tokens": {"prompt": row}}) for row in rows])
        tokens = nn.utils.rnn.pad_sequence(
            rows, batch_first=True, padding_value=self._pad_id, padding_side="left"
        )
        # The mask is explicit, because a prompt may hold the padding token.
        lengths = torch.tensor([len(row) for row in rows], device=device)
        attended = torch.arange(tokens.shape[1], 0, -1, device=device) <= lengths[:, None]
        return TensorDict(
            {"tokens": {"prompt": tokens}, "masks": {"all_attention_mask": attended}},
            batch_size=[len(rows)],
        )

    def _read(
        self, row: TensorDictBase, prompt: Sequence[int], limit: int, stops: StopStrings | None
    ) -> Drawn:
        """Read one response, without padding or tokens after its end."""
        response = _numbers(row, (self._tokens, "response"))
        if response is None:
            raise RuntimeError(
                f"the policy must return {(self._tokens, 'response')}, got {sorted(row.keys())}."
            )
        echoed = _numbers(row, (self._tokens, "prompt"))
        if echoed is not None and echoed[-len(prompt) :] != list(prompt):
            raise RuntimeError(
                f"the policy answered another prompt than it was given: {len(prompt)} tokens "
                f"{list(prompt)[:8]}... became {len(echoed)} tokens {echoed[:8]}...; does it drop "
                "padding tokens from prompts? Give its tokenizer a pad_token that no prompt holds."
            )
        reported = _numbers(row, (self._log_probs, "response"))
        if reported is not None and len(reported) != len(response):
            raise RuntimeError(
                "the policy must report one log-probability per sampled token, got "
                f"{len(reported)} for {len(response)} tokens."
            )
        end = next((i for i, token in enumerate(response, 1) if token in self._stop_ids), None)
        string = None
        if stops is not None and stops.found is not None and stops.num_tokens <= limit:
            end, string = stops.num_tokens, stops.found
        size = min(limit, len(response) if end is None else end)
        if size == 0:
            raise RuntimeError("the policy returned a response without a token.")
        return Drawn(response[:size], None if reported is None else reported[:size], string)


def generate_kwargs_of(policy: Any) -> Mapping[str, Any]:
    """A policy's generation arguments by transformers' names; empty if it has none."""
    kwargs = getattr(policy, "generate_kwargs", None)
    if isinstance(kwargs, Mapping):
        return {name: value for name, value in kwargs.items() if value is not None}
    params = getattr(policy, "sampling_params", None)  # vLLM's
    fields = getattr(params, "__struct_fields__", None) or getattr(params, "__dict__", {})
    values = {name: getattr(params, name) for name in fields if not name.startswith("_")}
    names = {"max_tokens": "max_new_tokens", "n": "num_return_sequences"}
    # vLLM's params have all fields; an empty one was not set.
    return {
        names.get(name, name): value
        for name, value in values.items()
        if value or (name == "temperature" and value is not None)
    }


def require_own_distribution(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments other than temperature and truncation that change the distribution.

    With such arguments (penalties, searches, other truncation), log-probabilities cannot be computed
    from the model's logits.

    Args:
        arguments: a policy's arguments, from :func:`generate_kwargs_of`.

    Raises:
        ValueError: if an argument is known to change the distribution, or is not known at all.
    """
    altering = altering_arguments(arguments)
    if altering:
        raise ValueError(
            f"policy must sample from its model's own distribution, got generate_kwargs {altering}: "
            "log-probabilities would not be those of what was sampled. Leave these out, or pass "
            "check=False if nothing is trained on the responses."
        )


def _require_policy(policy: Any) -> None:
    """Refuse anything but a policy that generates one response per prompt."""
    if isinstance(policy, type) or not callable(policy):
        raise TypeError(
            "policy must be a TorchRL LLM policy (an LLMWrapperBase, or a module from TensorDict to "
            f"TensorDict), got {policy if isinstance(policy, type) else type(policy).__name__}."
        )
    if hasattr(policy, "config") and hasattr(policy, "generate") and isinstance(policy, nn.Module):
        raise TypeError(
            f"policy must take and return TensorDicts, got the model {type(policy).__name__}: wrap it "
            "as TransformersWrapper(model, tokenizer=tokenizer, input_mode='tokens'), or use "
            "TransformersEngine."
        )
    if getattr(policy, "generate", True) is False:
        raise ValueError("policy must generate, got a policy with generate=False.")
    samples = generate_kwargs_of(policy).get("num_return_sequences") or 1
    samples = max(samples, getattr(policy, "num_samples", None) or 1)
    if samples > 1:
        raise ValueError(
            f"policy must give one response per prompt, got num_samples={samples}: ask for a group of "
            "episodes instead (group_size of the collector)."
        )


def _require_tokens(policy: Any) -> None:
    """Refuse a wrapper that does not take tokens, or that batches requests itself."""
    mode = getattr(policy, "input_mode", "tokens")
    if mode != "tokens":
        raise ValueError(f'policy must have input_mode="tokens", got {mode!r}.')
    if isinstance(policy, LLMWrapperBase) and min_batch_size(policy) is not None:
        raise ValueError(
            f"policy must not batch by itself, got min_batch_size={min_batch_size(policy)}: the engine "
            "makes the batches."
        )


def _rebuilt(
    policy: TransformersWrapper,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    stop_ids: frozenset[int],
    pad_id: int,
    closing: threading.Event,
) -> TransformersWrapper:
    """Copy a policy for tokens in and out, independent of the model's generation config."""
    setattr(model, "generation_config", GenerationConfig())  # noqa: B010 - the model is our own view
    own = policy.get_new_version(
        model=model,
        tokenizer=tokenizer,
        input_mode="tokens",
        input_key=("tokens", "prompt"),
        pad_output=True,
        return_log_probs=True,
        inplace=False,
        num_samples=None,
    )
    given = dict(generate_kwargs_of(own))
    for name in _hf_kwargs(Sampling()):
        given.pop(name, None)

    def is_closing(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.new_full(input_ids.shape[:1], closing.is_set(), dtype=torch.bool)

    ends = StoppingCriteriaList([*given.pop("stopping_criteria", []), is_closing])
    own.generate_kwargs = {
        **given,
        "eos_token_id": sorted(stop_ids),
        "pad_token_id": pad_id,
        "stopping_criteria": ends,
    }
    return own


def _hf_kwargs(params: Sampling) -> dict[str, Any]:
    """Sampling parameters as arguments of transformers' ``generate``."""
    if params.temperature == 0:
        return {"do_sample": False, **dict.fromkeys(asdict(params))}
    # transformers takes a min_p of 0 for one that is set.
    return {"do_sample": True, **asdict(params), "min_p": params.min_p or None}


class _Strings:
    """Stopping criterion that ends each row with its stop strings.

    Args:
        stops: the stop strings of each row, or ``None``.
        stop_ids: tokens that end a row, after which it has padding only.
    """

    def __init__(self, stops: Sequence[StopStrings | None], stop_ids: frozenset[int]) -> None:
        self._open = {i: row for i, row in enumerate(stops) if row is not None}
        self._stop_ids = stop_ids

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Whether a string ended each row with its last token."""
        last: list[int] = input_ids[:, -1].tolist()
        ended = [i for i, row in self._open.items() if last[i] in self._stop_ids]
        found = [i for i, row in self._open.items() if i not in ended and row.ended_by(last[i])]
        for i in (*ended, *found):
            del self._open[i]
        return torch.tensor([i in found for i in range(len(last))], device=input_ids.device)


@contextmanager
def _evaluating(policy: Any) -> Iterator[None]:
    """Evaluation mode inside the context; every submodule's mode is restored afterwards."""
    modules = policy.modules() if isinstance(policy, nn.Module) else ()
    trained = [module for module in modules if module.training]
    for module in trained:
        module.training = False
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def _numbers(row: TensorDictBase, key: tuple[Any, str]) -> list[Any] | None:
    """A row's tensor as a flat list; ``None`` if it is missing."""
    if key[0] is None:
        return None
    value = row.get(key, None)
    return None if value is None else value.reshape(-1).tolist()
