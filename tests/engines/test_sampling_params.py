"""What a sampler is told is on record, unless it is known to leave the distribution alone."""

from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from torchrl_mt.engines.policy.sampler import generate_kwargs_of, require_own_distribution
from torchrl_mt.engines.sampling_params import IDLE, NEUTRAL, altering_arguments, sampling_record

VLLM_REQUEST = {
    "model": "m", "prompt": [1, 2], "max_tokens": 16, "n": 1, "seed": 3, "stop": ["."],
    "stop_token_ids": [7], "stream": False, "logprobs": 1, "prompt_logprobs": None,
    "return_token_ids": True, "return_tokens_as_token_ids": True, "skip_special_tokens": False,
    "include_stop_str_in_output": True, "user": "me", "priority": 2, "cache_salt": "x",
    "min_p": 0.0, "min_tokens": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
    "ignore_eos": False, "logit_bias": {}, "response_format": {"type": "text"},
}  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        {"top_n_sigma": 1.0},
        {"xtc_probability": 0.0},
        {"lora_path": "adapter"},
        {"thinking_token_budget": 5},
        {"suffix": "after"},
        {"truncate_prompt_tokens": 5},
        {"vllm_xargs": {"top_n_sigma": 1.0}},
        {"prefix_allowed_tokens_fn": print},
    ],
)
def test_what_is_not_known_to_be_neutral_is_on_record(arguments):
    altered = {"temperature": 0.7, **arguments}
    assert sampling_record({**VLLM_REQUEST, **altered}) == altered
    with pytest.raises(ValueError, match=f"own distribution, got .*{next(iter(arguments))}"):
        require_own_distribution(arguments)


def test_what_is_neutral_or_not_given_is_not():
    assert sampling_record({**VLLM_REQUEST, "top_n_sigma": None}) == {}
    require_own_distribution({**VLLM_REQUEST, "temperature": 0.7, "top_k": 5, "do_sample": True})


def test_the_two_lists_have_nothing_in_common():
    assert not IDLE & NEUTRAL.keys()
    assert not altering_arguments(NEUTRAL)
    assert not altering_arguments(dict.fromkeys(NEUTRAL))


def test_a_generation_config_as_it_is_made_bends_nothing():
    said = GenerationConfig().to_dict()
    assert altering_arguments({name: said[name] for name in said if not name.startswith("_")}) == {}


def test_fields_of_vllms_parameters_that_nobody_knows_count_when_they_are_set():
    class Params:
        __struct_fields__ = ("temperature", "top_k", "max_tokens", "output_kind", "new", "_hidden")
        temperature, top_k, max_tokens, output_kind, new, _hidden = 0.0, 0, 5, 2, None, 3

    policy = SimpleNamespace(sampling_params=Params())
    assert generate_kwargs_of(policy) == {"temperature": 0.0, "max_new_tokens": 5, "output_kind": 2}
    require_own_distribution(generate_kwargs_of(policy))
    policy.sampling_params.new = 1.5
    with pytest.raises(ValueError, match=r"'new': 1\.5"):
        require_own_distribution(generate_kwargs_of(policy))
    assert generate_kwargs_of(SimpleNamespace()) == {}
