"""What is private to TorchRL is as the package takes it to be."""

from __future__ import annotations

from torchrl.modules.llm import TransformersWrapper

from torchrl_mt._hosts.torchrl import min_batch_size


def test_a_wrapper_says_how_many_requests_it_waits_for(model, tokenizer):
    def wrapper(**kwargs):
        return TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", **kwargs)

    assert min_batch_size(wrapper()) is None
    assert min_batch_size(wrapper(batching=True, min_batch_size=3)) == 3
