from __future__ import annotations

import copy

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torchrl_mt.collectors import ChatTokens


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def as_template(tokenizer, template, *special):
    """A copy of the tokenizer with another chat template and further special tokens."""
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>", *special]})
    other.chat_template = template
    return other


def chatml(tokenizer):
    """Qwen's shape: the end of a turn is the end of sequence, and a token follows it."""
    return as_template(
        tokenizer,
        "{% for m in messages %}<start> {{ m['role'] }} {{ m['content'] }}<end> <nl>{% endfor %}"
        "{% if add_generation_prompt %}<start> assistant{% endif %}",
        "<start>",
        "<nl>",
    )


def llama3(tokenizer):
    """A document starts with a token of its own; nothing follows the end of a turn."""
    return as_template(
        tokenizer,
        "<begin>{% for m in messages %}<header> {{ m['role'] }} </header> {{ m['content'] }}<eot>"
        "{% endfor %}{% if add_generation_prompt %}<header> assistant </header>{% endif %}",
        *("<begin>", "<header>", "</header>", "<eot>"),
    )


def gemma(tokenizer):
    """The end of a turn is not the tokenizer's end of sequence."""
    return as_template(
        tokenizer,
        "{% for m in messages %}<turn> {{ m['role'] }} {{ m['content'] }} </turn> <nl>{% endfor %}"
        "{% if add_generation_prompt %}<turn> assistant{% endif %}",
        *("<turn>", "</turn>", "<nl>"),
    )


def metaspace(tokenizer):
    """Llama 2's shape: a text begins with a space that its middle does not have."""
    words = [
        *("<pad>", "</s>", "\n", "▁\n", "U:", "A:", "▁U:", "▁A:"),
        *("▁guess", "▁8", "▁higher"),
    ]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Metaspace(prepend_scheme="first"),
        ]
    )
    other = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")
    other.chat_template = (
        "{% for m in messages %}{{ 'U:' if m['role'] == 'user' else 'A:' }} {{ m['content'] }}\n</s>"
        "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    return other


SHAPES = [
    (lambda tokenizer: tokenizer, "<end>"),
    (chatml, "<end>"),
    (llama3, "<eot>"),
    (gemma, "</turn>"),
    (metaspace, "</s>"),
]


@pytest.mark.parametrize(("shape", "end"), SHAPES)
def test_pieces_add_up_to_the_rendered_conversation(tokenizer, shape, end):
    tokenizer = shape(tokenizer)
    chat = ChatTokens(tokenizer)
    talk = [user("guess"), said("8"), user("higher"), said("8"), user("guess")]
    whole, hint = render(tokenizer, talk), tokenizer.convert_tokens_to_ids(end)
    # What a model would sample is whatever the template's tokens hold between opening and end.
    pieces = chat.open(talk[:1])
    for k in (2, 4):
        stop = whole.index(hint, len(pieces)) + 1
        pieces += whole[len(pieces) : stop]
        pieces += chat.extend([talk[k]], last_token=hint)
        assert pieces == render(tokenizer, talk[: k + 1])


def render(tokenizer, messages):
    """Tokens of a whole conversation at once."""
    return tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("shape", [shape for shape, _ in SHAPES])
def test_an_answer_that_was_cut_is_closed(tokenizer, shape):
    tokenizer = shape(tokenizer)
    chat = ChatTokens(tokenizer)
    whole = render(tokenizer, [user("guess"), said("8"), user("higher")])
    pieces = chat.open([user("guess")])
    pieces += whole[len(pieces) : len(pieces) + 1]  # the one token of "8"
    assert pieces + chat.extend([user("higher")], last_token=None) == whole


def test_an_answer_that_ended_by_a_token_that_the_template_does_not_write_is_closed(tokenizer):
    tokenizer = gemma(tokenizer)
    chat = ChatTokens(tokenizer)
    cut = chat.extend([user("higher")], last_token=None)
    assert chat.extend([user("higher")], last_token=tokenizer.eos_token_id) == cut


def test_a_stop_token_within_the_messages_is_no_end_of_the_answer(tokenizer):
    chat = ChatTokens(tokenizer)
    sampled = tokenizer.convert_tokens_to_ids("<user>")
    cut = chat.extend([user("higher")], last_token=None)
    assert chat.extend([user("higher")], last_token=sampled) == cut


def test_no_messages_lead_to_the_next_answer_too(tokenizer):
    chat = ChatTokens(tokenizer)
    after = chat.extend([], last_token=tokenizer.eos_token_id)
    assert after == tokenizer.convert_tokens_to_ids(["<assistant>"])


def test_long_messages_are_not_kept(tokenizer):
    chat = ChatTokens(tokenizer)
    for number in range(3):
        chat.extend([user(f"{number} " + "higher " * 10_000)], last_token=None)
    assert chat._extend_cached.cache_info().currsize == 0
    chat.extend([user("higher")], last_token=None)
    assert chat._extend_cached.cache_info().currsize == 1


def test_what_a_caller_does_with_the_tokens_does_not_spoil_the_next_conversation(tokenizer):
    chat = ChatTokens(tokenizer)
    first = chat.open([user("guess 1 to 16")])
    expected = list(first)
    first.append(99)
    assert chat.open([user("guess 1 to 16")]) == expected


def test_structured_messages_are_rendered_too(tokenizer):
    chat = ChatTokens(tokenizer)
    plain = chat.open([user("guess")])
    assert chat.open([{**user("guess"), "tool_calls": [{"name": "x"}]}]) == plain


@pytest.mark.parametrize(
    ("template", "eos", "message"),
    [
        (None, "<end>", "must have a chat template, got none"),
        ("{{ messages[-1]['content'] }}", None, "must have an end-of-turn token"),
        ("{{ messages | length }}", "<end>", "must write the assistant's content as it is"),
    ],
)
def test_unusable_tokenizers_are_refused(tokenizer, template, eos, message):
    broken = copy.deepcopy(tokenizer)
    broken.chat_template = template
    broken.eos_token = eos
    with pytest.raises(ValueError, match=message):
        ChatTokens(broken)


def test_a_template_that_changes_what_it_wrote_is_refused(tokenizer):
    unstable = copy.deepcopy(tokenizer)
    unstable.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}"
        "{% if loop.last %} <end> {% else %} , {% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="the same way when others follow"):
        ChatTokens(unstable).extend([user("higher")], last_token=None)


def test_an_empty_opening_is_refused(tokenizer):
    with pytest.raises(ValueError, match="at least one message"):
        ChatTokens(tokenizer).open([])
