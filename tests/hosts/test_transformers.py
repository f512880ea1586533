"""transformers still keeps what it says of a model where it is looked for."""

import pytest
import torch
import transformers

from torchrl_mt._hosts.transformers import attention_implementation, cache_argument

SMALL = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
SMALL |= dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1)


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | options)).eval()


# --- Models that score rows -----------------------------------------------------------------------


def test_the_attention_that_was_asked_for_is_read_back():
    assert attention_implementation(llama(attn_implementation="eager")) == "eager"
    assert attention_implementation(torch.nn.Linear(1, 1)) is None


@pytest.mark.filterwarnings("error")
def test_the_name_of_the_cache_is_one_that_no_release_warns_of():
    class Earlier(torch.nn.Module):
        def forward(self, input_ids, past_key_values=None):
            return input_ids

    assert cache_argument(Earlier()) == "past_key_values"
    model, cache = llama(), transformers.DynamicCache()
    model(torch.ones(1, 2, dtype=torch.long), **{cache_argument(model): cache})
    assert cache.get_seq_length() == 2
