from __future__ import annotations

import copy
import logging
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.chat.messages import render, said, system, tool, user
from tests.chat.templates import (
    CHATML,
    GEMMA,
    LLAMA3,
    MISTRAL,
    PLAIN,
    QWEN3,
    byte_level,
    sentence_piece,
)
from tests.chat.templates import SHAPES as REAL_SHAPES
from tests.tiers import few_or_many
from torchrl_mt.chat import ChatTokens
from torchrl_mt.testing import tiny_chat_tokenizer


def forgiving(tokenizer):
    """The tokenizer with padding in the place of words that it does not know."""
    backend = Tokenizer(models.WordLevel(tokenizer.get_vocab(), "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    other = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=tokenizer.eos_token, pad_token=tokenizer.pad_token
    )
    other.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    other.chat_template = tokenizer.chat_template
    return other


def as_template(tokenizer, template, *special):
    """A copy of the tokenizer with another chat template and further special tokens."""
    other = forgiving(tokenizer)
    other.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>", *special]})
    other.chat_template = template
    return other


@pytest.mark.parametrize(
    ("shape", "last"),
    [
        (GEMMA, "<eos>"),  # the tokenizer's end of sequence, which the template does not write
        (LLAMA3, "<|end_of_text|>"),
        (CHATML, "\n"),  # behind the end of the turn
        (LLAMA3, "<|start_header_id|>"),  # within the messages
    ],
)
def test_only_the_end_of_the_turn_stands_for_itself(shape, last):
    talk = Talk(shape, user("guess"))
    (token,) = talk.ids(last)
    cut = talk.chat.extend([user("higher")], last_token=None)
    assert talk.chat.extend([user("higher")], last_token=token) == cut


def test_an_end_of_turn_that_did_not_end_the_answer_is_not_written_twice():
    """A base model's engine knows another stop token; a stop string names the template's."""
    talk = Talk(replace(CHATML, eos="<|endoftext|>", special=IM), user("guess"))
    (end,) = talk.ids("<|im_end|>")
    answer = [*talk.encode("8"), end]
    talk.turn(answer, user("higher"), cut=True)
    assert talk.extends
    assert talk.tokenizer.decode(talk.prompt) == talk.rendered


def test_the_stop_token_of_the_engine_is_no_text_whichever_it_is(tokenizer):
    chat = ChatTokens(tokenizer)
    ids = tokenizer.convert_tokens_to_ids(["8", "higher"])
    assert chat.text(ids, last_token=ids[-1]) == "8"
    assert chat.text(ids) == chat.text(ids, last_token=ids[0]) == "8 higher"
    answer = chat.read(ids, prompt_ids=chat.open([user("guess")]), last_token=ids[-1])
    assert (answer.text, answer.message["content"]) == ("8", "8")


def test_no_messages_lead_to_the_next_answer_too(tokenizer):
    chat = ChatTokens(tokenizer)
    after = chat.extend([], last_token=tokenizer.eos_token_id)
    assert after == tokenizer.convert_tokens_to_ids(["<assistant>"])


def test_long_messages_are_not_kept(tokenizer):
    chat = ChatTokens(tokenizer)
    for number in range(1, 4):
        chat.extend([user(f"{number} " + "higher " * 10_000)], last_token=None)
    assert chat._cached_tokens.cache_info().currsize == 0
    chat.extend([user("higher")], last_token=None)
    assert chat._cached_tokens.cache_info().currsize == 1


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
    ("template", "eos", "policy", "message"),
    [
        (None, "<end>", "fork", "must have a chat template, got none"),
        ("{{ messages[-1]['content'] }}", None, "fork", "must have an end-of-turn token"),
        ("{{ messages | length }}", "<end>", "fork", "must write the assistant's content as it is"),
        ("{{ messages }}", "<end>", "retry", r"on_break must be one of .* got 'retry'"),
    ],
)
def test_unusable_tokenizers_and_policies_are_refused(tokenizer, template, eos, policy, message):
    broken = copy.deepcopy(tokenizer)
    broken.chat_template, broken.eos_token = template, eos
    with pytest.raises(ValueError, match=message):
        ChatTokens(broken, on_break=policy)


@pytest.mark.parametrize("roles", [[], ["assistant"], ["user"], ["user", "assistant", "user"]])
def test_a_dialogue_that_does_not_end_with_an_answer_is_refused(tokenizer, roles):
    messages, chat = [{"role": role, "content": "guess"} for role in roles], ChatTokens(tokenizer)
    with pytest.raises(ValueError, match=r"messages must hold the dialogue up to the response"):
        chat.next_prompt(messages, [], [1], [2], last_token=None)
    with pytest.raises(ValueError, match="at least one message"):
        chat.open([])


STABLE = [shape for shape in REAL_SHAPES if shape.stable]
named = {"ids": lambda value: getattr(value, "name", None)}


class Talk:
    """A dialogue as it is played: what the model sees and says, as tokens and as messages."""

    def __init__(self, shape, *opening, on_break="fork", base=None):
        self.shape = shape
        self.tokenizer = shape.on(base or byte_level())
        self.chat = ChatTokens(self.tokenizer, on_break=on_break)
        self.stop = self.tokenizer.convert_tokens_to_ids(shape.stop)
        self.messages, self.prompt = list(opening), self.chat.open(opening)

    def turn(self, answer, *new, cut=False):
        """Sample this text (or these tokens), let the messages follow, and return the next prompt."""
        ids = self.encode(answer) if isinstance(answer, str) else answer
        self.answer = ids if cut else [*ids, self.stop]
        self.messages.append(said(self.chat.text(self.answer)))
        self.seen = [*self.prompt, *self.answer]
        self.prompt = self.chat.next_prompt(
            *(self.messages, new, self.prompt, self.answer), last_token=None if cut else self.stop
        )
        self.messages.extend(new)
        return self.prompt

    def encode(self, text):
        """Tokens of a text, special tokens' names read as text."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def ids(self, *pieces):
        """Tokens of a prompt that is written out by hand: special tokens and the texts between."""
        special = {*self.shape.special, self.shape.stop, self.shape.eos, self.shape.bos}
        parts = [
            [self.tokenizer.convert_tokens_to_ids(p)] if p in special else self.encode(p)
            for p in pieces
        ]
        return [token for part in parts for token in part]

    @property
    def rendered(self):
        """The template's own text of the dialogue."""
        return self.tokenizer.apply_chat_template(
            self.messages, tokenize=False, add_generation_prompt=True
        )

    @property
    def extends(self):
        """Whether the prompt begins with what the model saw and said."""
        return self.prompt[: len(self.seen)] == self.seen


IM = ("<|im_start|>", "<|im_end|>")


def test_chatml_token_by_token():
    talk = Talk(CHATML, user("guess"))
    opening = (IM[0], "system\nbe helpful", IM[1], "\n", IM[0], "user\nguess", IM[1], "\n")
    prompt = talk.turn("8", user("higher"))
    first = (*opening, IM[0], "assistant\n", "8", IM[1])
    second = ("\n", IM[0], "user\nhigher", IM[1], "\n", IM[0], "assistant\n")
    assert prompt == talk.ids(*first, *second)
    prompt = talk.turn("12", tool("correct"), cut=True)
    third = (IM[1], "\n", IM[0], "user\n[result]\ncorrect\n[/result]", IM[1], "\n")
    assert prompt == talk.ids(*first, *second, "12", *third, IM[0], "assistant\n")


THOUGHT = "<think>\nlower\n</think>\n\n"


def test_stripped_thinking_forks_and_only_thinking_does():
    talk = Talk(QWEN3, user("guess"))
    opening = (IM[0], "user\nguess", IM[1], "\n", IM[0], "assistant\n")
    plain = ("8", IM[1], "\n", IM[0], "user\nhigher", IM[1], "\n", IM[0], "assistant\n")
    assert talk.turn("8", user("higher")) == talk.ids(*opening, *plain)
    # Within one user's question the template keeps the thinking.
    result = (IM[0], "user\n[result]\nlower\n[/result]", IM[1], "\n", IM[0], "assistant\n")
    assert talk.turn(THOUGHT + "12", tool("lower")) == talk.ids(
        *(*opening, *plain, THOUGHT + "12", IM[1], "\n", *result)
    )
    assert talk.turn("9", user("guess")) == talk.ids(
        *(*opening, *plain, "12", IM[1], "\n", *result, "9", IM[1], "\n", *opening)
    )
    assert not talk.extends


@pytest.mark.parametrize("shape", REAL_SHAPES, **named)
@pytest.mark.parametrize("base", [byte_level, sentence_piece])
def test_it_is_found_out_whether_a_template_is_stable(shape, base):
    chat = ChatTokens(shape.on(base()))
    assert chat.stable == (chat.breaks is None) == shape.stable


def test_a_break_is_shown_by_example():
    breaks = ChatTokens(QWEN3.on(byte_level())).breaks
    assert breaks.startswith(
        "an answer with its thinking makes it rewrite the dialogue (user, assistant, user): "
    )
    assert r"the model has seen 'im_start|>assistant\n<think>\nTHOUGHT" in breaks
    assert r"rendered as 'im_start|>assistant\nANSWER" in breaks


TURN = "<{{ m['role'] }}> {{ m['content'] }} <end> "
REWRITING = {
    "separator": TURN.replace("<end>", "{{ '<end>' if loop.last else ',' }}"),
    "the assistant's separator": TURN.replace(
        "<end>", "{{ ',' if m['role'] == 'assistant' and not loop.last else '<end>' }}"
    ),
    "thoughts in a field": TURN.replace(
        "{{ m['content'] }}", "{{ m['reasoning_content'] if loop.last }} {{ m['content'] }}"
    ),
    "thoughts of earlier answers": TURN.replace(
        "{{ m['content'] }}",
        "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}",
    ),
    "thoughts that were cut": TURN.replace(
        "{{ m['content'] }}",
        "{{ m['content'] if '</think>' in m['content'] else m['content'].split('<think>')[0] }}",
    ),
    "empty answers left out": "{% if m['content'] %}" + TURN + "{% endif %}",
    "old messages left out": "{% if loop.index0 > loop.length - 4 %}" + TURN + "{% endif %}",
    "old results left out": "{% if loop.last or m['role'] != 'tool' %}" + TURN + "{% endif %}",
    "the last one marked": "{{ 'new' if loop.revindex < 3 else 'old' }}" + TURN,
    "results announced": "{{ 'tools' if loop.first and messages[-1].role == 'tool' }}" + TURN,
    "more asked for": "{{ 'more' if loop.first and messages[-1].role == 'assistant' }}" + TURN,
}


def turns(turn):
    """A template that writes each message so."""
    asked = "{% if add_generation_prompt %}<assistant>{% endif %}"
    return "{% for m in messages %}" + turn + "{% endfor %}" + asked


@pytest.mark.parametrize("turn", [TURN, *REWRITING.values()], ids=["stable", *REWRITING])
def test_templates_that_rewrite_are_seen_through(tokenizer, turn):
    rewriting = copy.deepcopy(tokenizer)
    rewriting.chat_template = turns(turn)
    assert ChatTokens(rewriting).stable == (turn == TURN)


@pytest.mark.parametrize(
    ("rewrites", "forked"),
    [
        ("not loop.last", "<user> guess <sep> <assistant> 8 <sep> <user> higher <end> <assistant>"),
        (
            "m['role'] == 'assistant' and not loop.last",
            "<user> guess <end> <assistant> 8 <sep> <user> higher <end> <assistant>",
        ),
    ],
)
def test_a_separator_that_the_last_message_lacks(tokenizer, rewrites, forked):
    turn = TURN.replace("<end>", "{{ '<sep>' if " + rewrites + " else '<end>' }}")
    rewriting = as_template(tokenizer, turns(turn), "<sep>")
    prompt, answer = rewriting(["<user> guess <end> <assistant>", "8 <end>"])["input_ids"]
    dialogue, hint = [user("guess"), said("8")], [user("higher")]
    appended = "<user> guess <end> <assistant> 8 <end> <sep> <user> higher <end> <assistant>"
    for policy, words in {"fork": forked, "append": appended}.items():
        chat = ChatTokens(rewriting, on_break=policy)
        after = chat.next_prompt(dialogue, hint, prompt, answer, last_token=answer[-1])
        assert after == rewriting.convert_tokens_to_ids(words.split())


def test_a_message_that_is_rewritten_at_the_same_length_forks(tokenizer):
    mark = "{% if m['role'] == 'user' %}{{ 'higher ' if loop.last else 'lower  ' }}{% endif %}"
    marking = as_template(tokenizer, turns(mark + TURN))
    chat, dialogue = ChatTokens(marking), [user("guess")]
    prompt, answer = chat.open(dialogue), marking("8 <end>")["input_ids"]
    assert prompt == marking("higher <user> guess <end> <assistant>")["input_ids"]
    dialogue.append(said("8"))
    after = chat.next_prompt(dialogue, [user("9")], prompt, answer, last_token=answer[-1])
    words = "lower <user> guess <end> <assistant> 8 <end> higher <user> 9 <end> <assistant>"
    assert after == marking(words)["input_ids"]


def test_thinking_that_is_opened_and_kept_is_stable():
    """The template writes the tag itself and takes it out of the text."""
    keeping = replace(
        CHATML,
        template=CHATML.template.replace(
            "{%- if message.role == 'tool' %}",
            "{%- if message.role == 'assistant' %}{{- '<|im_start|>assistant\n<think>\n' + "
            "message.content.split('<think>\n')[-1] + '<|im_end|>\n' }}"
            "{%- elif message.role == 'tool' %}",
        ).replace(r"'<|im_start|>assistant\n' }}", "'<|im_start|>assistant\n<think>\n' }}"),
    )
    assert ChatTokens(keeping.on(byte_level())).stable


def test_the_end_of_the_document_is_no_end_of_an_answer(tokenizer):
    """Phi 3's shape: a dialogue that nobody is to answer ends with a token of its own."""
    ending = as_template(
        tokenizer,
        # A result begins unlike the end of the document, a user's message does not.
        "{% for m in messages %}{{ ',' if m['role'] == 'tool' else '<' + m['role'] + '>' }} "
        "{{ m['content'] }} <eot> {% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% else %}{{ eos_token }}{% endif %}",
        "<eot>",
    )
    chat = ChatTokens(ending)
    assert chat.stable
    rest = ending.convert_tokens_to_ids(["<user>", "higher", "<eot>", "<assistant>"])
    stop = ending.convert_tokens_to_ids("<eot>")
    assert chat.extend([user("higher")], last_token=stop) == rest
    assert chat.extend([user("higher")], last_token=None) == [stop, *rest]


def test_a_turn_that_is_ended_by_the_beginning_of_the_next(tokenizer):
    """GLM 4's shape: a model stops where it would have the user speak."""
    open_ended = as_template(tokenizer, turns("<{{ m['role'] }}> {{ m['content'] }} "))
    chat = ChatTokens(open_ended)
    assert chat.stable
    first, *rest = whole = open_ended.convert_tokens_to_ids(["<user>", "higher", "<assistant>"])
    assert chat.extend([user("higher")], last_token=first) == rest
    assert chat.extend([user("higher")], last_token=open_ended.eos_token_id) == whole
    assert chat.extend([user("higher")], last_token=None) == whole


def test_thoughts_in_a_field_of_their_own_are_compared_as_they_were_said():
    talk = Talk(QWEN3, user("guess"))
    answer = [*talk.encode(THOUGHT + "12"), talk.stop]
    seen = [*talk.prompt, *answer]
    dialogue = [user("guess"), {**said("12"), "reasoning_content": "lower"}]
    given = {"prompt_ids": talk.prompt, "answer_ids": answer, "last_token": talk.stop}
    after = talk.chat.next_prompt(dialogue, [tool("lower")], **given)
    assert after[: len(seen)] == seen
    after = talk.chat.next_prompt(dialogue, [user("lower")], **given)
    assert after == render(talk.tokenizer, [user("guess"), said("12"), user("lower")])


def test_white_space_that_a_template_trims_is_no_difference():
    trimming = replace(QWEN3, template=QWEN3.template.replace("content + ", "content | trim + "))
    talk = Talk(trimming, user("guess"))
    rest = ("\n", IM[0], "user\nhigher", IM[1], "\n", IM[0], "assistant\n")
    for answer in (" 8\n\n", "\n", ""):
        assert talk.turn(answer, user("higher")) == [*talk.seen, *talk.ids(*rest)]
    assert not talk.chat.stable


@pytest.mark.parametrize("on_break", ["fork", "append"])
def test_one_warning_when_it_matters(caplog, on_break):
    with caplog.at_level(logging.WARNING, "torchrl_mt"):
        Talk(CHATML, user("guess"), on_break=on_break).turn(THOUGHT + "8", user("higher"))
        talk = Talk(QWEN3, user("guess"), on_break=on_break)
        if on_break == "fork":
            talk.turn("8", user("higher"))
        assert not caplog.records
        for _ in range(3):
            talk.turn(THOUGHT + "8", user("higher"))
    (record,) = caplog.records
    assert record.name == "torchrl_mt"
    assert talk.chat.breaks in record.getMessage()
    assert f"on_break='{on_break}'" in record.getMessage()


def test_a_refused_dialogue_names_the_message():
    talk = Talk(MISTRAL, user("guess"))
    refusals = [
        (lambda: talk.chat.open([system("rules"), user("guess")]), "0 of 2", "system"),
        (lambda: talk.chat.open([user("guess"), user("guess"), said("8")]), "1 of 3", "user"),
        # The fixed context is none of the caller's messages, the dialogue is.
        (lambda: talk.chat.extend([user("higher"), user("8")], last_token=None), "1 of 2", "user"),
        (lambda: talk.turn("8", tool("lower")), "2 of 3", "tool"),
    ]
    for call, number, role in refusals:
        words = rf"message {number} \(role '{role}'\): TemplateError: .*(alternate|supported)"
        with pytest.raises(ValueError, match=words) as caught:
            call()
        assert type(caught.value.__cause__).__name__ == "TemplateError"


def test_a_refused_generation_prompt_is_named(tokenizer):
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = strict.chat_template.replace(
        "{% if add_generation_prompt %}",
        "{% if add_generation_prompt %}{% if messages[-1]['role'] == 'assistant' %}"
        "{{ raise_exception('whose turn is it?') }}{% endif %}",
    )
    chat = ChatTokens(strict)
    assert chat.stable
    with pytest.raises(ValueError, match=r"generation prompt behind message 1 of 2 .* whose turn"):
        chat.open([user("guess"), said("8")])
    with pytest.raises(ValueError, match=r"generation prompt behind an answer: .* whose turn"):
        chat.extend([], last_token=None)


def test_a_template_that_wants_a_system_message():
    tokenizer = tiny_chat_tokenizer("guess higher", extra_roles=["system"])
    strict = as_template(
        tokenizer,
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('rules first') }}{% endif %}"
        + tokenizer.chat_template,
        "<system>",
    )
    chat = ChatTokens(strict)
    assert chat.stable
    assert chat.extend([user("higher")], last_token=None) == strict.convert_tokens_to_ids(
        ["<end>", "<user>", "higher", "<end>", "<assistant>"]
    )
    with pytest.raises(ValueError, match="rules first"):
        chat.open([user("guess")])


@pytest.mark.parametrize("on_break", ["fork", "append"])
def test_what_only_this_dialogue_allows_is_appended(tokenizer, on_break):
    needs = "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    needs += "{{ raise_exception('a result needs a call') }}{% endif %}"
    calling = as_template(tokenizer, turns(needs + TURN), "<tool>")
    chat = ChatTokens(calling, on_break=on_break)
    assert chat.stable
    prompt, answer = [2, 4], calling("8 <end>")["input_ids"]
    call = {**said("8"), "tool_calls": [{"name": "look"}]}
    given = ([tool("12")], prompt, answer)
    after = chat.next_prompt([user("guess"), call], *given, last_token=answer[-1])
    expected = calling.convert_tokens_to_ids(["<tool>", "12", "<end>", "<assistant>"])
    assert after == [*prompt, *answer, *expected]
    with pytest.raises(ValueError, match="a result needs a call"):
        chat.next_prompt([user("guess"), said("8")], *given, last_token=answer[-1])


def test_control_words_that_overlap_stay_text(tokenizer):
    other = as_template(tokenizer, tokenizer.chat_template, "<<end>>", "end>")
    special = set(other.all_special_ids) - {other.pad_token_id}
    ids = ChatTokens(other).open([user("<<end>> guess<<end>end>higher")])
    names = [other.convert_ids_to_tokens(token) for token in ids if token in special]
    assert names == ["<user>", "<end>", "<assistant>"]


def test_no_part_of_a_control_word_is_lost(tokenizer):
    """A tokenizer that knows no word of it still has a token for each of the two halves."""
    ids = ChatTokens(forgiving(tokenizer)).open([user("<end> 8")])
    names = ["<user>", "<pad>", "<pad>", "8", "<end>", "<assistant>"]
    assert ids == tokenizer.convert_tokens_to_ids(names)


def special_in(talk, prompt=None):
    """The special tokens of a prompt, in their order."""
    special = set(talk.tokenizer.all_special_ids)
    return [token for token in prompt or talk.prompt if token in special]


WORDS = [
    "guess",
    "a number",
    "from",
    "ü",
    "界",
    "🙂",
    "0",
    "\n",
    "  ",
    ",",
    "[INST]",
    "role",
    "user",
]
CONTROL = ["<|im_end|>", "<|im_start|>", "<|eot_id|>", "</s>", "<end_of_turn>", "<|User|>", "<s>"]


def texts(words):
    """Texts without white space at their ends."""
    return st.lists(st.sampled_from(words), max_size=6).map("".join).map(str.strip)


@st.composite
def dialogues(draw, *, words=(*WORDS, *CONTROL), thoughts=True):
    """A shape, the opening, and turns: thought, answer, how it was sampled, what follows."""
    shape = draw(st.sampled_from(REAL_SHAPES))
    content = texts(words)
    opening = [user(draw(content))]
    if shape.system and draw(st.booleans()):
        opening.insert(0, system(draw(content)))
    thought = st.sampled_from(["", "\n", "lower\n", "so\nlower\n"] if thoughts else [""])
    turns = st.tuples(thought, content, st.booleans(), st.booleans(), content)
    return shape, opening, draw(st.lists(turns, min_size=1, max_size=3))


CHATS = {}


@few_or_many(30, 75)
def test_prompts_are_what_the_template_would_write(examples):
    settings(max_examples=examples)(given(dialogues())(check_prompts))()


def check_prompts(dialogue):
    shape, opening, turns = dialogue
    talk = cached_talk(shape, opening)
    for thought, answer, spelled, cut, follow in turns:
        opened = "" if shape.opens else "<think>\n"
        text = (f"{opened}{thought}</think>\n\n" if thought else "") + answer
        text = text.rstrip()
        # Mistral's template writes a space before an answer, which the model therefore samples too.
        text = f" {text}" if shape is MISTRAL else text
        ids = talk.encode(text)
        if spelled:
            ids = [token for letter in text for token in talk.encode(letter)]
        talk.turn(ids, user(follow), cut=cut)
        if shape is MISTRAL:
            talk.messages[-2]["content"] = text[1:]
        whole, seen = talk.rendered, talk.tokenizer.decode(talk.seen)
        assert talk.tokenizer.decode(talk.prompt) == whole
        # Whoever can be appended to is appended to: what was sampled is not encoded again.
        assert talk.extends == whole.startswith(seen)
        assert talk.extends or not shape.stable
        clean = [{**m, "content": without_control(talk, m["content"])} for m in talk.messages]
        assert special_in(talk) == special_in(talk, render(talk.tokenizer, clean))


def cached_talk(shape, opening):
    """A talk on tokens that are made once for each shape."""
    if shape not in CHATS:
        CHATS[shape] = Talk(shape, user("guess"))
    talk = copy.copy(CHATS[shape])
    talk.messages, talk.prompt = list(opening), talk.chat.open(opening)
    return talk


def without_control(talk, text):
    """A text with every special token's name made harmless."""
    for name in sorted(talk.tokenizer.all_special_tokens, key=len, reverse=True):
        text = text.replace(name, "x")
    return text


@settings(max_examples=20)
@given(dialogues(words=["guess", " a number", "ü", " higher", " from one"], thoughts=False))
def test_nothing_is_rewritten_under_append(dialogue):
    shape, opening, turns = dialogue
    talk = cached_talk(shape, opening)
    chat = talk.chat = copy.copy(talk.chat)
    chat.on_break = "append"
    for _, answer, _, cut, follow in turns:
        talk.turn(THOUGHT + answer, user(follow), cut=cut)
        last = None if cut else talk.stop
        assert talk.prompt == [*talk.seen, *chat.extend([user(follow)], last_token=last)]


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("shape", [*STABLE, PLAIN], **named)
def test_pieces_add_up_where_spaces_belong_to_words(shape, scheme):
    talk = Talk(shape, user("guess a number"), base=sentence_piece(scheme))
    for answer, follow in [("one", "higher"), ("two ü", "lower, or not"), ("", "界")]:
        talk.messages.append(said(answer))
        asked = len(talk.prompt)
        new = user(follow)
        whole = render(talk.tokenizer, [*talk.messages, new])
        assert whole[:asked] == talk.prompt
        sampled = whole[asked : whole.index(talk.stop, asked) + 1]
        ending = 2 if shape is PLAIN else 1  # a line's end too
        for cut in (True, False):
            ids = sampled[:-ending] if cut else sampled
            last = None if cut else talk.stop
            after = talk.chat.next_prompt(talk.messages, [new], talk.prompt, ids, last_token=last)
            assert after == whole
        talk.prompt, talk.messages = whole, [*talk.messages, new]


class Counting:
    """A tokenizer that counts what it renders and encodes."""

    def __init__(self, tokenizer):
        self._tokenizer, self.messages, self.characters = tokenizer, 0, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, text, **kwargs):
        self.characters += len(text)
        return self._tokenizer(text, **kwargs)

    def apply_chat_template(self, messages, **kwargs):
        self.messages += len(messages)
        return self._tokenizer.apply_chat_template(messages, **kwargs)


@pytest.mark.parametrize(
    ("shape", "on_break", "grows"),
    [*((s, "fork", False) for s in STABLE), (QWEN3, "append", False), (QWEN3, "fork", True)],
)
def test_the_cost_of_a_turn_does_not_grow_with_the_dialogue(shape, on_break, grows):
    counting = Counting(shape.on(byte_level()))
    chat = ChatTokens(counting, on_break=on_break)
    ids = counting._tokenizer.encode("lower", add_special_tokens=False)
    costs = []
    for turns in (1, 50):
        messages = [user("guess"), said("lower")] * turns
        counting.messages = counting.characters = 0
        # A new text each time: what is remembered would cost nothing.
        chat.next_prompt(messages, [user(f"higher {turns:2}")], ids * turns, ids, last_token=None)
        costs.append((counting.messages, counting.characters))
    assert (costs[1] != costs[0]) == grows
    assert costs[0][0] > 0
