"""What a sampler's arguments say of the distribution that its tokens are drawn from.

Whatever makes it another than the model's own is in the record that goes with the tokens, under the
name that the sampler has for it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torchrl_mt.engines.sampling import Sampling

__all__ = ["NEUTRAL", "TruncationWarning", "sampling_of", "sampling_record"]

_logger = logging.getLogger("torchrl_mt")

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "top_h": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "num_beams": (None, 1),
    "use_beam_search": (None, False),
    "repetition_penalty": (None, 1),
    "encoder_repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "diversity_penalty": (None, 0),
    "penalty_alpha": (None, 0),
    "length_penalty": (None, 1),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "bad_words": (None, []),
    "bad_words_ids": (None, []),
    "force_words_ids": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "allowed_token_ids": (None, []),
    "sequence_bias": (None, {}),
    "logit_bias": (None, {}),
    "logits_processor": (None, []),
    "logits_processors": (None, []),
    "watermarking_config": (None,),
    "structured_outputs": (None,),
    "guided_decoding": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "response_format": (None, {"type": "text"}),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
}
"""Of what bends a distribution in another way than :class:`Sampling` does, the values that do not.

The names are those of transformers, vLLM and SGLang.
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
        The arguments that make a difference to plain sampling at temperature 1.

    Raises:
        TypeError: if one is no number.
        ValueError: if one is out of range.

    Examples:
        >>> sampling_record({"temperature": 1, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 3})
        {'top_p': 0.9, 'repetition_penalty': 1.1}
    """
    record = sampling_of(arguments, vocab_size).record()
    return record | {
        name: value
        for name, value in arguments.items()
        if name in NEUTRAL and value not in NEUTRAL[name]
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
