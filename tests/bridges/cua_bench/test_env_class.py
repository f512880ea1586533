"""Prompts of observations, each of which is all that the model sees."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_mt.bridges.cua_bench.env_class import ObservationPrompts
from torchrl_mt.collectors.workflow import Rejected


def encode(text):
    """One token for each letter."""
    return {"input_ids": list(map(ord, text))}


@settings(max_examples=30)
@given(
    opening=st.text("abc", min_size=1, max_size=8),
    added=st.lists(st.text("xyz", max_size=6), max_size=12),
    longest=st.integers(4, 30),
)
def test_the_oldest_turns_are_left_out_and_nothing_else(opening, added, longest):
    prompts = ObservationPrompts(encode, longest)
    least = 0
    for number in range(len(added) + 1):
        obs = opening + "".join(added[:number])
        newest = added[number - 1] if number else ""
        if len(opening) + len(newest) > longest:
            with pytest.raises(Rejected, match=f"max_prompt_length={longest}") as caught:
                prompts.tokens(obs)
            assert caught.value.cause == "prompt_too_long"
            return
        seen = "".join(map(chr, prompts.tokens(obs)))
        assert len(seen) <= longest
        kept = [
            left_out
            for left_out in range(max(number, 1))
            if opening + "".join(added[left_out:number]) == seen
        ]
        assert kept, "what is seen is the opening and the newest turns"
        assert max(kept) >= least, "a turn that was left out does not come back"
        least = min(k for k in kept if k >= least)
        if len(opening + "".join(added[least:number])) == len(obs):
            assert seen == obs


def test_an_observation_that_starts_anew_is_a_new_opening():
    prompts = ObservationPrompts(encode, 6)
    texts = ["ab", "abxx", "abxxyy", "abxxyyzz", "abq", "cccccc"]
    seen = ["".join(map(chr, prompts.tokens(text))) for text in texts]
    assert seen == ["ab", "abxx", "abxxyy", "abzz", "abq", "cccccc"]
