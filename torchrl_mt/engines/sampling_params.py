"""Sampling arguments of transformers, vLLM and SGLang, and which of them change the distribution.

A completion's record holds every argument that changes the distribution of its tokens, and every
argument that is not known here, under the sampler's own name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torchrl_mt.engines.sampling import BOUNDS, Sampling, checked_number

__all__ = [
    "IDLE",
    "NEUTRAL",
    "TruncationWarning",
    "altering_arguments",
    "sampling_of",
    "sampling_record",
]

_logger = logging.getLogger("torchrl_mt")

_NEUTRAL_AT: tuple[tuple[Any, str], ...] = (
    (None, "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id"),
    (None, "watermarking_config structured_outputs json_schema regex ebnf"),
    (None, "guided_decoding guided_json guided_regex guided_choice guided_grammar"),
    (False, "use_beam_search ignore_eos remove_invalid_values token_healing"),
    (0, "epsilon_cutoff eta_cutoff presence_penalty frequency_penalty diversity_penalty"),
    (0, "penalty_alpha no_repeat_ngram_size encoder_no_repeat_ngram_size"),
    (0, "min_length min_new_tokens min_tokens"),
    (1, "typical_p top_h num_beams num_beam_groups best_of repetition_penalty"),
    (1, "encoder_repetition_penalty length_penalty guidance_scale"),
    ([], "bad_words bad_words_ids force_words_ids suppress_tokens begin_suppress_tokens"),
    ([], "allowed_token_ids logits_processor logits_processors constraints"),
    ({}, "sequence_bias logit_bias extra_args vllm_xargs custom_params"),
    ({"type": "text"}, "response_format"),
    (-1, "truncate_prompt_tokens"),
)
NEUTRAL: dict[str, Any] = {name: value for value, names in _NEUTRAL_AT for name in names.split()}
"""Arguments that change the distribution in ways that :class:`Sampling` does not cover.

The value is the one that changes nothing; ``None`` changes nothing either.
"""

_PARAMS = frozenset({"temperature", "top_k", "top_p", "min_p", "do_sample"})
"""Arguments that :func:`sampling_of` reads."""

_ENDS = """
early_stopping eos_token_id max_completion_tokens max_length max_new_tokens max_time max_tokens stop
stop_regex stop_sequences stop_strings stop_token_ids stopping_criteria
"""
_SHOWS = """
detokenize echo flat_logprobs include_stop_str_in_output logprob_start_len logprobs no_stop_trim
output_attentions output_hidden_states output_kind output_logits output_scores prompt_logprobs
return_dict_in_generate return_hidden_states return_logprob return_text_in_logprobs return_token_ids
return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens stream stream_interval
stream_options streamer token_ids_logprob top_logprobs top_logprobs_num
"""
_RUNS = """
add_special_tokens bos_token_id cache_config cache_implementation cache_salt compile_config
continuous_batching_config decoder_start_token_id disable_compile kv_transfer_params low_memory
max_cache_len metadata model n num_return_sequences pad_token_id prefill_chunk_size priority prompt
renormalize_logits request_id rid sampling_seed seed service_tier skip_clone skip_reading_prefix_cache
store synced_gpus tokenizer transformers_version use_cache user
"""
_DRAFTS = """
assistant_confidence_threshold assistant_early_exit assistant_lookbehind is_assistant
max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule prompt_lookup_num_tokens
target_lookbehind
"""
IDLE = frozenset((_ENDS + _SHOWS + _RUNS + _DRAFTS).split())
"""Arguments that never change the distribution of the next token.

They control when a response ends, what is returned, how it is computed, or speculative decoding, which
preserves the distribution (https://arxiv.org/abs/2211.17192).
"""


def sampling_of(arguments: Mapping[str, Any], vocab_size: int | None = None) -> Sampling:
    """Read temperature and truncation from sampling arguments, and check all that have bounds.

    Args:
        arguments: by the names of transformers, vLLM or SGLang; missing or ``None`` is off.
        vocab_size: size of the vocabulary; a ``top_k`` that keeps all tokens is off.

    Raises:
        TypeError: if an argument is no number.
        ValueError: if an argument is out of range.

    Examples:
        >>> sampling_of({"temperature": 0.7, "top_k": -1, "top_p": None})
        Sampling(temperature=0.7, top_k=0, top_p=1.0, min_p=0.0)
        >>> sampling_of({"do_sample": False, "top_k": 50}).temperature
        0.0
    """
    for name in arguments.keys() & BOUNDS.keys():
        if arguments[name] is not None:
            checked_number(name, arguments[name])
    bias = arguments.get("logit_bias")
    if bias is not None and not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias must be a mapping from tokens to numbers, got {bias!r}.")
    asked = {name: arguments.get(name) for name in _PARAMS - {"do_sample"}}
    if arguments.get("do_sample") is False:
        asked["temperature"] = 0.0
    if vocab_size is not None and (asked["top_k"] or 0) >= vocab_size:
        asked["top_k"] = 0
    return Sampling().changed(**asked)


def sampling_record(arguments: Mapping[str, Any], vocab_size: int | None = None) -> dict[str, Any]:
    """Make the ``sampling`` record of a completion.

    Args:
        arguments: as in :func:`sampling_of`.
        vocab_size: as in :func:`sampling_of`.

    Returns:
        The arguments that make sampling differ from plain sampling at temperature 1, and all unknown
        ones that are not ``None``.

    Raises:
        TypeError: if an argument is no number.
        ValueError: if an argument is out of range.

    Examples:
        >>> sampling_record({"temperature": 1, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 3})
        {'top_p': 0.9, 'repetition_penalty': 1.1}
        >>> sampling_record({"top_n_sigma": 1.0, "max_tokens": 8, "stop": ["."]})
        {'top_n_sigma': 1.0}
    """
    return sampling_of(arguments, vocab_size).record() | altering_arguments(arguments)


def altering_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Select arguments, other than temperature and truncation, that may change the distribution.

    Args:
        arguments: as in :func:`sampling_of`.

    Returns:
        All arguments except ``temperature``, ``top_k``, ``top_p``, ``min_p`` and ``do_sample``, those
        that are ``None`` or :data:`IDLE`, and those with their :data:`NEUTRAL` value.
    """
    return {
        name: value
        for name, value in arguments.items()
        if name not in _PARAMS
        and name not in IDLE
        and value is not None
        and not (name in NEUTRAL and value == NEUTRAL[name])
    }


class TruncationWarning:
    """Warns once, of the first completion whose distribution differs by more than temperature."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Check a completion's record, from :func:`sampling_record`."""
        if self._said or not record.keys() - {"temperature"}:
            return
        self._said = True
        _logger.warning(
            "Sampling with %s is truncated or bent: its log-probabilities are those of what was "
            "left of the model's distribution, so importance ratios against the full distribution "
            "are biased. Completion.sampling records it.",
            dict(record),
        )
