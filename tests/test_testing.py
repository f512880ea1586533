"""The tiny tokenizer renders what it was made for, and refuses the rest."""

from __future__ import annotations

import copy
import pickle
from contextlib import closing, contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.collectors.runs import collecting
from torchrl_mt.chat import ChatTokens
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.testing import tiny_chat_model, tiny_chat_tokenizer

WORDS = "look red blue"
ROLES = ("user", "assistant", "system", "tool")


def talk(role):
    return [{"role": "user", "content": "look"}, {"role": role, "content": "red"}]


def render(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, return_dict=False)


@pytest.mark.parametrize("role", ["system", "tool", "function"])
def test_a_role_that_the_tokenizer_has_no_token_for_is_refused_with_the_remedy(role):
    tokenizer = tiny_chat_tokenizer(WORDS)
    message = rf"no role '{role}': .*extra_roles=\['{role}'\]"
    with pytest.raises(Exception, match=message):
        render(tokenizer, talk(role))
    with pytest.raises(ValueError, match=message):
        ChatTokens(tokenizer).open(talk(role))


def test_further_roles_have_special_tokens_of_their_own():
    tokenizer = tiny_chat_tokenizer(WORDS, extra_roles=("system", "tool"))
    for role in ROLES:
        ids = render(tokenizer, talk(role))
        assert tokenizer.pad_token_id not in ids
        assert tokenizer.decode(ids) == f"<user> look <end> <{role}> red <end>"
        assert tokenizer.convert_tokens_to_ids(f"<{role}>") in tokenizer.all_special_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "look red"


def test_further_roles_change_no_id_of_a_word():
    plain = tiny_chat_tokenizer(WORDS).get_vocab()
    assert plain == {
        **{"<pad>": 0, "<end>": 1, "<user>": 2, "<assistant>": 3},
        **{"look": 4, "red": 5, "blue": 6},
    }
    more = tiny_chat_tokenizer(WORDS, extra_roles=("system", "tool")).get_vocab()
    assert more == {**plain, "<system>": 7, "<tool>": 8}
    assert tiny_chat_tokenizer(WORDS.split(), extra_roles="system tool").get_vocab() == more


class Lab(TextEnv):
    """Says the same after each of three answers."""

    def __init__(self, opening, said):
        self.opening, self.said = opening, said

    def reset(self, data=None):
        self.calls = 0
        return [{"role": role, "content": "look"} for role in self.opening]

    def step(self, response):
        self.calls += 1
        return TextStep([self.said], 1.0, self.calls == 3)


@contextmanager
def lab(model, tokenizer, *args):
    with (
        closing(TransformersEngine(model, tokenizer, max_new_tokens=64)) as engine,
        collecting(lambda: Lab(*args), engine, n=2, sampling={"seed": 0}) as collector,
    ):
        yield collector


def test_a_model_talks_to_a_tool():
    model, tokenizer = tiny_chat_model(WORDS, extra_roles=("system", "tool"), hidden_size=32)
    assert model.config.vocab_size == len(tokenizer) == 9
    said = {"role": "tool", "content": "red"}
    with lab(model, tokenizer, ["system", "user"], said) as collector:
        batch = next(iter(collector))
        for prompt in batch.get(("tokens", "prompt"), as_list=True):
            assert tokenizer.decode(prompt).startswith("<system> look <end> <user> look <end>")
        assert collector.stats()["forks"] == 0


@pytest.mark.parametrize(
    "encode",
    [
        lambda tokenizer: tokenizer("look up red"),
        lambda tokenizer: tokenizer(["look", "red up"]),
        lambda tokenizer: tokenizer("look", "up"),
        lambda tokenizer: tokenizer.encode("<user>up<end>look"),
        lambda tokenizer: tokenizer([["look", "up"]], is_split_into_words=True),
        lambda tokenizer: render(tokenizer, [{"role": "user", "content": "look up"}]),
        lambda tokenizer: ChatTokens(tokenizer).open([{"role": "user", "content": "look up"}]),
    ],
)
def test_an_unknown_word_is_named(encode):
    _, tokenizer = tiny_chat_model(WORDS, hidden_size=32)
    with pytest.raises(ValueError, match="does not know the word 'up'"):
        encode(tokenizer)


def test_other_errors_of_encoding_stay_what_they_are():
    with pytest.raises(Exception) as error:
        tiny_chat_tokenizer(WORDS)(7)
    assert "does not know" not in str(error.value)


def test_an_environment_with_an_unknown_word_is_rejected_with_its_name():
    torch.manual_seed(0)  # A model whose answer ends by itself.
    model, tokenizer = tiny_chat_model(WORDS, hidden_size=32)
    green = {"role": "user", "content": "green"}
    with (
        lab(model, tokenizer, ["user"], green) as collector,
        pytest.raises(RuntimeError, match="does not know the word 'green'"),
    ):
        next(iter(collector))


def test_it_is_copied_pickled_and_saved_like_any_other(tmp_path):
    tokenizer = tiny_chat_tokenizer(WORDS)
    for other in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert other("look red")["input_ids"] == [4, 5]
        with pytest.raises(ValueError, match="'up'"):
            other("up")
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is PreTrainedTokenizerFast
    assert render(loaded, talk("assistant")) == render(tokenizer, talk("assistant"))
    assert loaded.get_vocab() == tokenizer.get_vocab()


def test_a_model_and_its_tokenizer_come_back_from_one_folder(tmp_path):
    """By the model's family transformers may choose another class, which drops words in silence."""
    words = ["don't", "3.5", "lower_case", "größe", "▁x", "a,b", "<b>", "\N{ZERO WIDTH JOINER}"]
    model, tokenizer = tiny_chat_model(words, extra_roles=("system", "tool"), hidden_size=32)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    for token, number in tokenizer.get_vocab().items():
        assert loaded(token)["input_ids"] == [number]
        assert loaded.decode([number]) == token
    talk = [{"role": role, "content": " ".join(words)} for role in ROLES]
    assert render(loaded, talk) == render(tokenizer, talk)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())
