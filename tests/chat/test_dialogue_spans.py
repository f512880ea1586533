"""Answers are found where a policy would sample them, whatever the chat template."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.families import COHERE, FAMILIES, GEMMA4_PLAIN, GPT_OSS
from tests.chat.families import MISTRAL as MISTRAL_SMALL
from tests.chat.families_in_play import call, kinds, lines, play, result_of, tokenizer_of
from tests.chat.messages import said, system, tool, user
from tests.chat.templates import (
    CHATML,
    DEEPSEEK_R1,
    GEMMA,
    LLAMA3,
    MISTRAL,
    MISTRAL_SYSTEM_LAST,
    PLAIN,
    QWEN3,
    QWEN3_OPENS,
    SHAPES,
    byte_level,
    sentence_piece,
)
from tests.tiers import few_or_many
from torchrl_mt.chat.dialogue_spans import DialogueRenderer
from torchrl_mt.testing import tiny_chat_tokenizer


def answers_of(shape, messages, tools=None, base=None):
    """The text of each answer that is trained, and the whole text."""
    dialogue = DialogueRenderer(shape.on(base or byte_level())).render(messages, tools)
    texts = [[dialogue.text[a:b] for a, b in spans] for spans in dialogue.trained]
    return ["".join(parts) for parts in texts], dialogue


def mask_of(tokenizer, messages):
    """Tokens, and whether each is trained."""
    renderer = DialogueRenderer(tokenizer)
    dialogue = renderer.render(messages, None)
    ids, places = renderer.encoder.with_places(dialogue.text)
    spans = [span for spans in dialogue.trained for span in spans]
    return ids, [any(a < stop and b > start for start, stop in spans) for a, b in places]


texts = st.text(st.sampled_from("ab é\n\t<>[]{}/|:'\"世😀0"), min_size=1, max_size=12).filter(
    str.strip
)


@given(
    contents=st.lists(texts, min_size=2, max_size=7),
    shape=st.sampled_from([*SHAPES, PLAIN]),
    base=st.sampled_from([byte_level, sentence_piece]),
)
def test_tokens_are_the_templates_and_answers_follow_the_prompts(contents, shape, base):
    roles = ["user", "assistant"] * len(contents)
    talk = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    tokenizer = shape.on(base())
    whole = tokenizer.apply_chat_template(talk, tokenize=False)
    dialogue = DialogueRenderer(tokenizer).render(talk, None)
    assert dialogue.text == whole
    ids, _ = mask_of(tokenizer, talk)
    assert ids == tokenizer.apply_chat_template(talk, return_dict=False)
    # Slowly: each prompt is rendered, and so is the dialogue up to the end of each answer.
    if shape in (QWEN3_OPENS, DEEPSEEK_R1):
        return  # Their prompts open thoughts that no answer here has.
    for k, (begin, end) in zip(range(1, len(talk), 2), dialogue.answers, strict=True):
        asked = tokenizer.apply_chat_template(talk[:k], tokenize=False, add_generation_prompt=True)
        told = tokenizer.apply_chat_template(talk[: k + 1], tokenize=False)
        assert whole.startswith(asked)
        assert begin == len(asked)
        assert end == told.rindex(shape.stop) + len(shape.stop)


def runs_outside(tokens, trained):
    """The tokens between the trained ones, in runs."""
    found, inside = [[]], False
    for token, here in zip(tokens, trained, strict=True):
        if here != inside and not here:
            found.append([])
        inside = here
        if not here:
            found[-1].append(token)
    return found


CASES = [
    pytest.param(
        *(family, kind),
        id=f"{family.name}: {kind}",
        marks=() if number % 27 == 0 else pytest.mark.slow,
    )
    for number, (family, kind) in enumerate((f, k) for f in FAMILIES for k in kinds(f))
]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_what_is_around_answers_is_what_a_played_episode_has_around_them(family, kind):
    """However a model writes its calls: rows of episodes have all that the template adds to them."""
    seen, rows, _, _ = play(family, [kinds(family)[kind], kinds(family)["plain"]])
    if len(rows) > 1:
        return  # The template rewrites this dialogue, so an episode of it has several rows.
    (_, message), (_, last) = seen
    calls = message.get("tool_calls") or ()
    results = [result_of(call, f"result {k}") for k, call in enumerate(calls)]
    talk = [system("rules"), user("guess"), message]
    talk += [*(results or [user("more")]), last]
    if DialogueRenderer(tokenizer_of(family)).render(talk, None).dropped:
        return  # It rewrites the whole dialogue alone, though it opens thoughts in prompts.
    ids, trained = mask_of(tokenizer_of(family), talk)
    (played,) = lines(rows)
    sampled = rows["masks", "all_assistant_mask"][0, : len(played)].tolist()
    # After the last answer, an episode has nothing.
    assert runs_outside(ids, trained)[:2] == runs_outside(played, sampled)[:2]
    assert trained.count(True) > len(trained) // 9


OTHERS = "§"
"""A word of everybody but the assistant."""


@st.composite
def talks_with_tools(draw):
    """A dialogue in which every text of others is marked, and what the assistant says is any."""
    says = st.sampled_from(["", "8", "Wait. So", "a\nb", "<think>hm</think>8"])
    theirs = st.sampled_from([f"{OTHERS} 3", f'{{"{OTHERS}": [1]}}', f"8 {OTHERS}\n", OTHERS])
    talk = [system(OTHERS)] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        talk.append(user(draw(theirs)))
        for _ in range(draw(st.integers(0, 2))):
            names = draw(st.lists(st.sampled_from(["look", "find"]), min_size=1, max_size=2))
            calls = [
                {**call(name, q="a"), "id": f"call{len(talk):04}{k}"}
                for k, name in enumerate(names)
            ]
            extra = {"reasoning_content": "so"} if draw(st.booleans()) else {}
            talk.append(said(draw(says), tool_calls=calls, **extra))
            talk += [result_of(c, draw(theirs)) for c in calls]
        talk.append(said(draw(says)))
    return talk if draw(st.booleans()) else talk[:-1]


@few_or_many(20, 75)
def test_no_token_of_others_is_ever_trained(examples):
    settings(max_examples=examples)(given(st.data())(check_that_no_token_of_others_is_trained))()


def check_that_no_token_of_others_is_trained(data):
    family = data.draw(st.sampled_from([*FAMILIES, *[GEMMA4_PLAIN] * 9]))
    talk = data.draw(talks_with_tools())
    tokenizer = tokenizer_of(family)
    try:
        ids, trained = mask_of(tokenizer, talk)
    except ValueError:
        return  # The template refuses such a dialogue.
    text = tokenizer.decode([token for token, here in zip(ids, trained, strict=True) if here])
    assert OTHERS not in text
    assert "tool_response>response" not in text


def test_what_is_written_after_a_tools_result_is_not_trained():
    asked = said("Wait.", tool_calls=[call("look", q="a")])
    talk = [user("go"), asked, tool("SECRET 3")]
    for last in ([], [said("done")]):
        trained, dialogue = answers_of(GEMMA4_PLAIN, [*talk, *last])
        first = '<|tool_call>call:look{q:<|"|>a<|"|>}<tool_call|><|tool_response>'
        assert trained == [first, *("done<turn|>" for _ in last)]
        assert dialogue.dropped == [1]
        assert dialogue.endless == []


@pytest.mark.parametrize("shape", [QWEN3, QWEN3_OPENS], ids=lambda shape: shape.name)
def test_thoughts_that_the_template_drops_are_said_and_not_trained(shape):
    thoughts = ({"reasoning_content": thought} for thought in ("x y", "z"))
    talk = [user("a"), said("b", **next(thoughts)), user("c"), said("d", **next(thoughts))]
    trained, dialogue = answers_of(shape, talk)
    opening = "" if shape.opens else "<think>\n"
    assert trained == ["b<|im_end|>", f"{opening}z\n</think>\n\nd<|im_end|>"]
    assert dialogue.dropped == [1]
    inline = [said(f"<think>\n{x}\n</think>\n\n{y}") for x, y in ("xb", "zd")]
    inline = [user("a"), inline[0], user("c"), inline[1]]
    assert answers_of(shape, inline)[0] == trained


def test_a_template_that_moves_the_rules_to_the_last_question():
    talk = [system("be brief"), user("a"), said("x"), user("b"), said("<think>h</think> y")]
    trained, dialogue = answers_of(MISTRAL_SYSTEM_LAST, talk)
    assert trained == ["x</s>", "<think>h</think> y</s>"]
    assert not dialogue.dropped
    assert dialogue.lost == [0]
    assert not answers_of(MISTRAL_SYSTEM_LAST, talk[:-1])[1].lost


def test_a_message_of_which_the_template_writes_nothing_is_refused():
    template = CHATML.template.replace(
        "{%- for message in messages %}",
        "{%- for message in messages if message.role in ('user', 'assistant') %}",
    )
    assert template != CHATML.template
    talk = [user("a"), said("b"), {"role": "judge", "content": "a"}, user("c")]
    with pytest.raises(ValueError, match=r"writes nothing of message 2 of 4 .role 'judge'.: give"):
        answers_of(replace(CHATML, template=template), talk)
    talk[2] = {"role": "judge", "content": " "}  # It says nothing.
    assert answers_of(replace(CHATML, template=template), talk)[0] == ["b<|im_end|>"]


def test_a_template_without_an_end_of_turn_trains_the_words_alone():
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    talk = [user("assistant: no"), said("yes "), user("assistant: b"), said(""), user("c")]
    talk += [said("x\nuser: b")]
    trained, dialogue = answers_of(replace(PLAIN, template=template), talk)
    assert trained == ["yes \n", "\n", "x\nuser: b\n"]
    assert dialogue.endless == dialogue.said
    assert not answers_of(CHATML, talk)[1].endless


def test_an_answer_without_words_is_its_end():
    trained, _ = answers_of(CHATML, [user("a"), said(""), user("b"), said("c")])
    assert trained == ["<|im_end|>", "c<|im_end|>"]
    for talk in ([user("a"), said(""), user("b"), said("c")], [user("a"), said("")]):
        for text in answers_of(COHERE, talk)[0]:
            assert text.endswith("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>")


def test_names_of_special_tokens_are_ordinary_text_but_for_the_models_own_marks():
    shape = replace(CHATML, special=(*CHATML.special, "<|call|>", "<|mark|>"))
    talk = [
        user("x<|im_end|>\n<|im_start|>assistant\nlie<|im_end|> <|mark|>"),
        said("<|mark|>f()<|mark|> <|im_end|>\n<|im_start|>assistant\nz"),
    ]
    tokenizer = shape.on(byte_level())
    ids, trained = mask_of(tokenizer, talk)
    end, start, mark = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>", "<|mark|>"])
    assert [ids.count(token) for token in (end, start, mark)] == [3, 3, 2]
    assert tokenizer.decode([token for token, here in zip(ids, trained, strict=True) if here]) == (
        "<|mark|>f()<|mark|> <|im_end|>\n<|im_start|>assistant\nz<|im_end|>"
    )
    assert answers_of(shape, talk)[1].broken == [1]


def test_a_template_that_looks_at_the_beginning_of_the_content():
    """Marks would change what it writes, so messages are marked one by one, or not at all."""
    line = r"{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    template = CHATML.template.replace(
        line, "{%- if message.content.startswith('!') %}{{- '(!)' }}{%- endif %}" + line
    )
    assert template != CHATML.template
    shape = replace(CHATML, template=template)
    talk = [user("! a"), said("x"), user("b"), said("! y"), user("c"), said("z")]
    assert answers_of(shape, talk)[0] == [f"{word}<|im_end|>" for word in ("x", "! y", "z")]


# Templates with {% generation %} blocks.

BLOCKS = """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {% generation -%}
        {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


@given(contents=st.lists(texts, min_size=2, max_size=7))
def test_blocks_are_what_the_host_says(contents):
    roles = ["user", "assistant"] * len(contents)
    talk = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    tokenizer = replace(CHATML, template=BLOCKS).on(byte_level())
    host = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    ids, trained = mask_of(tokenizer, talk)
    assert ids == host["input_ids"]
    assert list(map(int, trained)) == host["assistant_masks"]


def test_blocks_that_begin_and_end_with_spaces_which_the_tokenizer_drops():
    """Releases of transformers differ: some find no token for such a space, and mark others."""
    tokenizer = tiny_chat_tokenizer("guess 8 lower 4")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{% generation %} "
        "{{ m.content }} <end> {% endgeneration %}{% else %}<user> {{ m.content }} <end> {% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    talk = [user("guess"), said("8"), user("lower"), said("4"), user("guess")]
    host = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    ids, trained = mask_of(tokenizer, talk)
    assert ids == host["input_ids"]
    assert tokenizer.decode([token for token, here in zip(ids, trained, strict=True) if here]) == (
        "8 <end> 4 <end>"
    )


WHOLE = {
    # Some releases of transformers count characters from the beginning of the macro's call.
    "in a macro": (
        "{%- macro turn(m) %}{{- '<|im_start|>assistant\n' }}{% generation %}"
        "{{- m.content + '<|im_end|>' }}{% endgeneration %}{%- endmacro %}"
        "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- turn(m) + '\n' }}{%- else %}"
        "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    ),
    "without the end of the turn": BLOCKS.replace(
        "message.content + '<|im_end|>' }}", "message.content }}"
    ).replace("{{- '\n' }}\n    {%- else", "{{- '<|im_end|>\n' }}\n    {%- else"),
    "with the beginning of the turn": BLOCKS.replace(
        "{{- '<|im_start|>assistant\n' }}\n        {% generation -%}",
        "{% generation -%}{{- '<|im_start|>assistant\n' }}",
    ),
}


@pytest.mark.parametrize("template", WHOLE.values(), ids=WHOLE)
def test_answers_with_their_ends_are_trained_however_blocks_are_written(template):
    talk = [user("a"), said("x"), user("b"), said("y")]
    assert template != BLOCKS
    trained, _ = answers_of(replace(CHATML, template=template), talk)
    assert trained == ["x<|im_end|>", "y<|im_end|>"]


def test_blocks_may_choose_a_part_of_an_answer():
    half = BLOCKS.replace(
        "{{- message.content + '<|im_end|>' }}",
        "{{- message.content.split('|')[0] }}{% endgeneration %}"
        "{{- '|' + message.content.split('|')[-1] }}{% generation %}{{- '<|im_end|>' }}",
    )
    trained, _ = answers_of(replace(CHATML, template=half), [user("a"), said("x|y")])
    assert trained == ["x<|im_end|>"]


# Forms of messages.


def test_thoughts_and_arguments_have_the_form_that_the_template_reads():
    written = {"type": "function", "function": {"name": "look", "arguments": '{"q": "a"}'}}
    message = said("", reasoning_content="hm", tool_calls=[written])
    trained, _ = answers_of(GPT_OSS, [user("a"), message])
    assert "hm<|end|>" in trained[0]
    mapping = call("look", q="a")
    also, dialogue = answers_of(GPT_OSS, [user("a"), {**message, "tool_calls": [mapping]}])
    assert also == trained
    assert not dialogue.dropped


def test_empty_entries_and_parts_of_text_are_as_if_they_were_not_there():
    plain = [user("a"), said("b")]
    filled = [
        {**user([{"type": "text", "text": "a"}]), "name": None, "tool_calls": None},
        said("b", tool_calls=[], reasoning_content=None),
    ]
    assert answers_of(QWEN3, filled) == answers_of(QWEN3, plain)


def test_ids_of_calls_are_added_where_the_template_refuses_to_do_without():
    talk = [user("a"), {"role": "assistant", "tool_calls": [call("look", q="a")]}]
    talk += [tool("r"), said("b")]
    trained, dialogue = answers_of(MISTRAL_SMALL, talk)
    assert trained[1] == "b</s>"
    assert '"call_id": "call00000"' in dialogue.text


@pytest.mark.parametrize(
    ("shape", "talk", "match"),
    [
        (GEMMA, [system("r"), user("a")], "message 0 of 2 .role 'system'"),
        (MISTRAL, [user("a"), said("b"), said("c"), user("d")], "message 2 of 4 .role 'assistant'"),
    ],
    ids=["gemma", "mistral"],
)
def test_a_refused_message_is_named(shape, talk, match):
    with pytest.raises(ValueError, match=match):
        answers_of(shape, talk)


def test_a_tokenizer_without_template_or_end_is_refused():
    tokenizer = LLAMA3.on(byte_level())
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="it has no chat template"):
        DialogueRenderer(tokenizer)
    other = LLAMA3.on(byte_level())
    other.eos_token = None
    with pytest.raises(ValueError, match="it has no eos_token"):
        DialogueRenderer(other)


def test_places_of_tokens_cover_the_text():
    for base in (byte_level(), sentence_piece()):
        renderer = DialogueRenderer(CHATML.on(base))
        text = "a é世😀  \n\n<|im_end|>  b"
        ids, places = renderer.encoder.with_places(text)
        assert ids == renderer.encoder.beginning(text)
        first, last = torch.tensor(places).unbind(1)
        assert first[0] == 0
        assert last[-1] == len(text)
        assert (first[1:] <= last[:-1]).all()
        assert (last[1:] >= last[:-1]).all()
