from __future__ import annotations

import copy

import pytest

from torchrl_mt.collectors import ChatTokens


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def test_pieces_add_up_to_the_rendered_conversation(tokenizer):
    chat = ChatTokens(tokenizer)
    opening, answer, hint = user("guess 1 to 16"), said("8"), user("higher")
    response = tokenizer("8 <end>", add_special_tokens=False)["input_ids"]
    pieces = chat.open([opening]) + response + chat.extend([hint], ended=True)
    whole = tokenizer.apply_chat_template(
        [opening, answer, hint], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert pieces == whole


def test_an_answer_that_was_cut_is_closed(tokenizer):
    chat = ChatTokens(tokenizer)
    ended = chat.extend([user("lower")], ended=True)
    assert chat.extend([user("lower")], ended=False) == [tokenizer.eos_token_id, *ended]


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
        ChatTokens(unstable).extend([user("higher")], ended=True)


def test_an_empty_opening_is_refused(tokenizer):
    with pytest.raises(ValueError, match="at least one message"):
        ChatTokens(tokenizer).open([])
