"""What a sampler's arguments say of the distribution that its tokens are drawn from.

Whatever makes it another than the model's own is in the record that goes with the tokens, under the
name that the sampler has for it; so is whatever is not known to leave it alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torchrl_mt.engines.sampling import Sampling

__all__ = ["IDLE", "NEUTRAL", "TruncationWarning", "bending", "sampling_of", "sampling_record"]

_logger = logging.getLogger("torchrl_mt")

_NEUTRAL_AT: tuple[tuple[Any, str], ...] = (
    (None, "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id"),
    (None, "watermarking_config structured_outputs json_schema regex ebnf"),
    (None, "guided_decoding guided_json guided_regex guided_choice guided_grammar"),
    (False, "use_beam_search ignore_eos remove_invalid_values token_healing"),
    (0, "min_p epsilon_cutoff eta_cutoff presence_penalty frequency_penalty diversity_penalty"),
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
"""Of what bends a distribution in another way than :class:`Sampling` does, the value that does not.

``None`` does not, either. The names are those of transformers, vLLM and SGLang.
"""

_LAW = frozenset({"temperature", "top_k", "top_p", "do_sample"})
"""What :func:`sampling_of` reads."""

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
"""What leaves the distribution of the next token alone, whatever its value.

It says when an answer ends, what of it is shown, how and for whom it is computed, or how tokens are
drafted that are then accepted with the model's own probability (https://arxiv.org/abs/2211.17192).
"""


def sampling_of(arguments: Mapping[str, Any], vocab_size: int | None = None) -> Sampling:
    """Temperature and truncation that arguments ask for.

    Args:
        arguments: by the names of transformers, vLLM or SGLang; what is missing or ``None`` is off.
        vocab_size: how many tokens there are; a ``top_k`` that keeps them all is off.

    Raises:
        TypeError: if one is no number.
        ValueError: if one is out of range.

    Examples:
        >>> sampling_of({"temperature": 0.7, "top_k": -1, "top_p": None})
        Sampling(temperature=0.7, top_k=0, top_p=1.0)
        >>> sampling_of({"do_sample": False, "top_k": 50}).temperature
        0.0
    """
    temperature, top_k, top_p = (arguments.get(n) for n in ("temperature", "top_k", "top_p"))
    if arguments.get("do_sample") is False:
        temperature = 0.0
    if top_k == -1 or (isinstance(top_k, int) and vocab_size is not None and top_k >= vocab_size):
        top_k = 0
    return Sampling().changed(temperature, top_k, top_p)


def sampling_record(arguments: Mapping[str, Any], vocab_size: int | None = None) -> dict[str, Any]:
    """What a completion says about the distribution that it was sampled from.

    Args:
        arguments: as in :func:`sampling_of`.
        vocab_size: as in :func:`sampling_of`.

    Returns:
        The arguments that make a difference to plain sampling at temperature 1, or that may: those
        that are not known here, and are not ``None``, are among them.

    Raises:
        TypeError: if one is no number.
        ValueError: if one is out of range.

    Examples:
        >>> sampling_record({"temperature": 1, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 3})
        {'top_p': 0.9, 'repetition_penalty': 1.1}
        >>> sampling_record({"top_n_sigma": 1.0, "max_tokens": 8, "stop": ["."]})
        {'top_n_sigma': 1.0}
    """
    return sampling_of(arguments, vocab_size).record() | bending(arguments)


def bending(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Find what is not known to leave a distribution what temperature and truncation make it.

    Args:
        arguments: as in :func:`sampling_of`.

    Returns:
        All but temperature, ``top_k`` and ``top_p``, what is ``None``, what is :data:`IDLE`, and what
        has its :data:`NEUTRAL` value.
    """
    return {
        name: value
        for name, value in arguments.items()
        if name not in _LAW
        and name not in IDLE
        and value is not None
        and not (name in NEUTRAL and value == NEUTRAL[name])
    }


class TruncationWarning:
    """Say once, of the first distribution that is not the model's own at some temperature."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Look at what a completion is to say about its distribution.

        Args:
            record: as :func:`sampling_record` makes it.
        """
        if self._said or not record.keys() - {"temperature"}:
            return
        self._said = True
        _logger.warning(
            "Sampling with %s is truncated or bent: its log-probabilities are those of what was "
            "left of the model's distribution, so importance ratios against the full distribution "
            "are biased. Completion.sampling records it.",
            dict(record),
        )
