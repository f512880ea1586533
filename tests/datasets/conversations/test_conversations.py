"""Conversations of every usual form become the rows that a played episode of them would be."""

from __future__ import annotations

import json
import logging
import math
import pickle
import re
from dataclasses import replace

import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict.nn import TensorDictModule
from torch.utils.data import DataLoader, Subset
from torchrl.objectives.llm.sft import SFTLoss

from tests.chat.families import QWEN25 as QWEN_TOOLS
from tests.chat.templates import CHATML, MISTRAL_SYSTEM_LAST, QWEN3, byte_level, sentence_piece
from torchrl_mt.datasets import ConversationDataset, to_hf_dataset
from torchrl_mt.objectives import MultiTurnLoss
from torchrl_mt.testing import tiny_chat_model, tiny_chat_tokenizer
from torchrl_mt.transforms import MergeTurns

from .games import played

datasets = pytest.importorskip("datasets")

WORDS = ["guess", "to", "higher", "lower", "correct", *map(str, range(1, 17))]
TALK = [("user", "guess"), ("assistant", "8"), ("user", "lower"), ("assistant", "4")]
MESSAGES = [{"role": role, "content": content} for role, content in TALK]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_chat_tokenizer(WORDS, extra_roles=["system", "tool"])


@pytest.fixture(scope="module")
def chatml():
    return CHATML.on(byte_level())


def trained(row, tokenizer):
    """The text that is trained."""
    return tokenizer.decode(row["tokens", "full"][row["masks", "all_assistant_mask"]])


def assert_same(a, b):
    assert set(a.keys(True, True)) == set(b.keys(True, True))
    assert (a == b).all()


def assert_same_rows(source, expected, tokenizer):
    """Check that a source has the rows of another one."""
    pairs = zip(*(ConversationDataset(each, tokenizer) for each in (source, expected)), strict=True)
    for row, other in pairs:
        assert_same(row, other)


def test_a_row_has_the_keys_of_merged_turns(tokenizer):
    row = ConversationDataset([{"messages": MESSAGES}], tokenizer)[0]
    assert tokenizer.decode(row["tokens", "full"]) == (
        "<user> guess <end> <assistant> 8 <end> <user> lower <end> <assistant> 4 <end>"
    )
    assert trained(row, tokenizer) == "8 <end> 4 <end>"
    assert row["turns", "full"].tolist() == [0] * 6 + [1] * 6
    assert not row["log_probs", "full"].any()
    assert not row["rewards", "full"].any()
    assert (row["versions", "full"] == -1).all()
    assert row["masks", "all_attention_mask"].all()


def test_rows_are_those_of_a_played_game(tokenizer):
    guesses = ["8", "4", "6", "5", "3", "8", "12", "10"]
    batch = played(tokenizer, guesses, [7, 10])
    merged = MergeTurns(pad_token_id=tokenizer.pad_token_id)(batch)
    talks = to_hf_dataset(batch)
    # The game's last word is behind the last answer, where an episode's row ends.
    source = [{"messages": talk["messages"][:-1]} for talk in talks]
    dataset = ConversationDataset(source, tokenizer)
    rows = dataset.collate(list(dataset))
    for key in ("tokens", "masks", "turns"):
        assert_same(rows[key], merged[key])
    # All of MergeTurns' entries but the engine's settings.
    assert set(rows.keys(True, True)) == set(merged.exclude("sampling").keys(True, True))
    whole = ConversationDataset(talks, tokenizer)
    size = int(rows["masks", "all_attention_mask"][0].sum())
    assert torch.equal(whole[0]["tokens", "full"][:size], rows["tokens", "full"][0, :size])
    assert not whole[0]["masks", "all_assistant_mask"][size:].any()


SHARE_GPT = [{"from": {"user": "human"}.get(r, "gpt"), "value": c} for r, c in TALK]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": MESSAGES, "tools": None, "note": 1},
        {"conversations": SHARE_GPT},
        {"conversations": MESSAGES},
        {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
        {"prompt": [], "completion": MESSAGES},
        {"messages": [{**message, "weight": 1, "train": True} for message in MESSAGES]},
        {"messages": [{**message, "name": None, "tool_calls": None} for message in MESSAGES]},
        {"messages": [{"role": r, "content": [{"type": "text", "text": c}]} for r, c in TALK]},
        {"messages": MESSAGES, "weight": None, "train": True},
        {"messages": [{"role": {"user": "Human"}.get(r, "Model"), "content": c} for r, c in TALK]},
        {"messages": [{"role": r.upper(), "content": c} for r, c in TALK]},
        {"conversations": [{**each, "from": each["from"].title()} for each in SHARE_GPT]},
    ],
)
def test_the_usual_forms_are_the_same_row(tokenizer, row):
    assert_same_rows([row], [{"messages": MESSAGES}], tokenizer)


def test_a_systems_text_may_be_a_column(tokenizer):
    rules = {"role": "system", "content": "higher"}
    row = {"system": "higher", "conversations": SHARE_GPT}
    assert_same_rows([row], [{"messages": [rules, *MESSAGES]}], tokenizer)


@pytest.mark.parametrize("name", ["arguments", "parameters"])
def test_share_gpts_calls_are_tool_calls(name):
    tokenizer = QWEN_TOOLS.on(byte_level())
    share_gpt = [
        {"from": "human", "value": "a?"},
        {"from": "function_call", "value": json.dumps({"name": "look", name: {"q": "a"}})},
        {"from": "observation", "value": "b"},
        {"from": "gpt", "value": "c"},
    ]
    call = {"type": "function", "function": {"name": "look", "arguments": {"q": "a"}}}
    messages = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "tool_calls": [call], "content": ""},
        {"role": "tool", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    source = [{"conversations": share_gpt, "tools": json.dumps(tools)}]
    assert_same_rows(source, [{"messages": messages, "tools": tools}], tokenizer)
    row = ConversationDataset(source, tokenizer)[0]
    expected = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
    assert row["tokens", "full"].tolist() == expected
    said = '<tool_call>\n{"name": "look", "arguments": {"q": "a"}}\n</tool_call>'
    assert trained(row, tokenizer) == f"{said}<|im_end|>c<|im_end|>"


def test_messages_may_be_left_out_or_weighted(tokenizer):
    first, last = MESSAGES[1], MESSAGES[3]
    for left_out in ({"weight": 0}, {"train": False}, {"weight": 0.0, "train": True}):
        messages = [MESSAGES[0], {**first, **left_out}, MESSAGES[2], last]
        row = ConversationDataset([{"messages": messages}], tokenizer)[0]
        assert trained(row, tokenizer) == "4 <end>"
        assert row["turns", "full"].max() == 1
        assert "weights" not in row
    prompt = ConversationDataset([{"prompt": MESSAGES[:3], "completion": [last]}], tokenizer)[0]
    assert_same(row, prompt)
    weighted = [MESSAGES[0], {**first, "weight": 0.5}, MESSAGES[2], last]
    dataset = ConversationDataset([{"messages": weighted}, {"messages": MESSAGES}], tokenizer)
    rows = dataset.collate([dataset[0], dataset[1]])
    mask = rows["masks", "all_assistant_mask"]
    assert rows["weights", "full"][mask].tolist() == [0.5, 0.5, 1, 1, 1, 1, 1, 1]


def test_a_row_may_be_left_out_or_weighted(tokenizer):
    rows = [
        {"messages": MESSAGES, "weight": 0.5},
        {"prompt": "guess", "completion": " 8", "weight": 0.5},
        {"messages": MESSAGES, "train": False},
        {"messages": MESSAGES, "weight": 0.0},
    ]
    dataset = ConversationDataset(rows, tokenizer)
    assert dataset[0]["weights", "full"].unique().tolist() == [0, 0.5]
    assert dataset[1]["weights", "full"].tolist() == [0, 0.5, 0.5]
    for row in (dataset[2], dataset[3]):
        assert not row["masks", "all_assistant_mask"].any()


def test_text_needs_no_template():
    tokenizer = tiny_chat_tokenizer(WORDS)
    tokenizer.chat_template = None
    rows = [{"prompt": "guess", "completion": " 8"}, {"messages": MESSAGES}]
    dataset = ConversationDataset(rows, tokenizer)
    assert trained(dataset[0], tokenizer) == "8 <end>"
    with pytest.raises(ValueError, match=r"conversation 1: .* but it has no chat template"):
        dataset[1]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="conversation 0: tokenizer must have an eos_token"):
        ConversationDataset(rows, tokenizer)[0]


def test_text_goes_on_from_a_prompt(chatml):
    rows = ConversationDataset([{"prompt": "the answer", "completion": " é is"}], chatml)
    assert trained(rows[0], chatml) == " é is<|im_end|>"
    assert chatml.decode(rows[0]["tokens", "full"]) == "the answer é is<|im_end|>"
    llama = CHATML.on(sentence_piece())
    row = ConversationDataset([{"prompt": "", "completion": "a"}], llama)[0]
    assert row["masks", "all_assistant_mask"].all()


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    side=st.sampled_from(["left", "right"]),
)
def test_collate_pads_on_the_right(lengths, side):
    tokenizer = tiny_chat_tokenizer(WORDS)
    tokenizer.padding_side = side
    dataset = ConversationDataset([{"messages": MESSAGES[: 2 * n]} for n in lengths], tokenizer)
    rows = dataset.collate(list(dataset))
    assert rows.batch_size == (len(lengths),)
    for n, row in enumerate(dataset):
        size = len(row["tokens", "full"])
        cut = rows[n].clone()
        for key in row.keys(True, True):
            cut[key] = cut[key][:size] if row[key].ndim else cut[key]
        assert_same(cut, row)
        here = rows["masks", "all_attention_mask"][n]
        assert here.sum() == size
        assert (rows["tokens", "full"][n, size:] == tokenizer.pad_token_id).all()
        assert (rows["turns", "full"][n, size:] == -1).all()


def test_a_long_conversation_is_cut_and_one_without_trained_tokens_is_named(tokenizer, caplog):
    whole = ConversationDataset([{"messages": MESSAGES}], tokenizer)[0]
    rows = [{"messages": MESSAGES}, {"messages": [MESSAGES[0]]}, {"messages": MESSAGES}]
    for length in range(1, 13):
        row = ConversationDataset(rows, tokenizer, max_length=length)[0]
        assert torch.equal(row["tokens", "full"], whole["tokens", "full"][:length])
        mask = whole["masks", "all_assistant_mask"][:length]
        assert torch.equal(row["masks", "all_assistant_mask"], mask)
    caplog.clear()
    dataset = ConversationDataset(rows, tokenizer, max_length=4)
    for _ in range(2):
        for row in dataset:
            assert not row["masks", "all_assistant_mask"].any()
    (record,) = caplog.records  # Others have none either.
    assert record.getMessage() == (
        "conversation 0 has no trained token: its answers lie behind max_length=4. Drop such rows: "
        "those whose ('masks', 'all_assistant_mask') is all false. This is said once."
    )
    caplog.clear()
    assert not ConversationDataset(rows, tokenizer)[1]["masks", "all_assistant_mask"].any()
    assert "it has no answer with a weight above 0" in caplog.records[0].getMessage()


@pytest.mark.slow
def test_what_a_worker_has_said_is_not_said_again(tokenizer, caplog):
    dataset = ConversationDataset([{"messages": MESSAGES[:1]}] * 2, tokenizer)
    loader = DataLoader(
        dataset, collate_fn=dataset.collate, num_workers=1, multiprocessing_context="fork"
    )
    assert len(list(loader)) == len(list(dataset)) == 2
    assert not caplog.records  # The worker's are in its own memory.


def test_a_message_that_leaves_no_trace_is_refused():
    tokenizer = QWEN_TOOLS.on(byte_level())
    messages = [*MESSAGES[:2], {"role": "judge", "content": "8"}]
    said = r"conversation 0: .*nothing of message 2 of 3 .role 'judge'"
    with pytest.raises(ValueError, match=said):
        ConversationDataset([{"messages": messages}], tokenizer)[0]


ENDLESS = replace(
    CHATML,
    template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
)
RULES = {"role": "system", "content": "be brief"}
THOUGHT = {"role": "assistant", "content": "b", "reasoning_content": "x"}
SPECIAL = {"role": "assistant", "content": "b<|im_end|>"}
LOST = "writes nothing of message 0 of conversation 1, a system message"
UNENDED = "message 1 of conversation 1, so this answer does not teach when to stop"
DROPPED = r"drops a part of message 1 of conversation 1.*template='training'"
BROKEN = "message 1 of conversation 1 names a special token"


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (MISTRAL_SYSTEM_LAST, [RULES, *MESSAGES], LOST),  # Some leave out rules by design.
        (ENDLESS, MESSAGES, UNENDED),
        (QWEN3, [MESSAGES[0], THOUGHT, MESSAGES[2], THOUGHT], DROPPED),
        (CHATML, [MESSAGES[0], SPECIAL], BROKEN),
    ],
    ids=["lost", "endless", "dropped", "broken"],
)
def test_what_a_template_does_to_messages_is_said_once(template, messages, text, caplog):
    # What is not trained, nothing is said of.
    untrained = [MESSAGES[0], {"role": "assistant", "content": "8", "weight": 0}]
    rows = [{"messages": each} for each in (untrained, messages, messages)]
    assert len(list(ConversationDataset(rows, template.on(byte_level())))) == 3
    said = [each.getMessage() for each in caplog.records]
    assert sum("has no trained token" in each for each in said) == 1
    (message,) = (each for each in said if "has no trained token" not in each)
    assert re.search(text, message)


# Sources.


@pytest.fixture
def talks():
    call = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"x": 1}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "r", "tool_call_id": "c1"}
    asked = {"role": "user", "content": "q"}
    return [
        {"messages": [asked, {"role": "assistant", "content": "a"}]},
        {"messages": [asked, said, result, {"role": "assistant", "content": "b"}]},
    ]


def test_files_are_read_as_lists_are(tmp_path, talks):
    tokenizer = QWEN_TOOLS.on(byte_level())
    lines, array, table = tmp_path / "a.jsonl", tmp_path / "a.json", tmp_path / "a.parquet"
    lines.write_text("\n\n".join(json.dumps(talk, ensure_ascii=False) for talk in talks) + "\n")
    array.write_text(json.dumps(talks))
    hugging_face = datasets.Dataset.from_list(talks)
    assert hugging_face[0]["messages"][0]["tool_calls"] is None  # Arrow fills in.
    hugging_face.to_parquet(table)
    hugging_face.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "parts").mkdir()
    hugging_face.to_parquet(tmp_path / "parts" / "0.parquet")
    sources = [lines, str(array), table, tmp_path / "saved", tmp_path / "parts", hugging_face]
    sources += [iter(talks), tuple(talks)]
    for source in sources:
        assert_same_rows(source, talks, tokenizer)


def test_arrows_fill_in_is_no_argument(talks, tmp_path):
    """Calls of two tools share the keys of their arguments in an Arrow table."""
    call = {"type": "function", "id": "c2", "function": {"name": "g", "arguments": {"y": 2}}}
    talks[0]["messages"][1] = {"role": "assistant", "content": "", "tool_calls": [call]}
    tokenizer = QWEN_TOOLS.on(byte_level())
    table = datasets.Dataset.from_list(talks)
    arguments = table[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"x": None, "y": 2}
    with (tmp_path / "a.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in table)
    sources = [table, Subset(table, [0, 1]), list(table), iter(table), table.to_iterable_dataset()]
    if hasattr(datasets, "Json"):
        with_notes = datasets.Features({**table.features, "notes": datasets.Json()})
        rows = [{**row, "notes": {"a": None}} for row in table]
        sources.append(datasets.Dataset.from_list(rows, features=with_notes))
    for source in [*sources, tmp_path / "a.jsonl"]:
        assert_same_rows(source, talks, tokenizer)


def test_a_null_that_was_written_is_kept(talks):
    """Arrow gives all messages the same keys; these differ."""
    talks[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"x": None}
    tokenizer = QWEN_TOOLS.on(byte_level())
    assert '"arguments": {"x": null}' in trained(
        ConversationDataset(talks, tokenizer)[1], tokenizer
    )


def test_arrows_fill_in_is_no_parameter_of_a_tool(chatml):
    tools = [
        {"function": {"name": name, "parameters": {"properties": {name: {"type": "string"}}}}}
        for name in ("f", "g")
    ]
    template = "{{ tools | tojson }}" + CHATML.template
    tokenizer = replace(CHATML, template=template).on(byte_level())
    rows = [{"messages": MESSAGES, "tools": [tool]} for tool in tools]
    table = datasets.Dataset.from_list(rows)
    for source in (table, list(table)):
        assert_same_rows(source, rows, tokenizer)


@pytest.mark.parametrize(
    ("source", "error", "match"),
    [
        ("nowhere.jsonl", FileNotFoundError, "source must be a file or a folder"),
        (3, TypeError, "source must be a datasets.Dataset, an iterable of rows or a path, got int"),
        (pandas.DataFrame({"prompt": ["a"]}), TypeError, r"give datasets.Dataset.from_pandas"),
        ({"train": []}, TypeError, r"choose a split, such as source\['train'\]"),
        (__file__, ValueError, "source must be a .jsonl, .json or .parquet file"),
    ],
)
def test_other_sources_are_refused(tokenizer, source, error, match):
    with pytest.raises(error, match=match):
        ConversationDataset(source, tokenizer)


GOOD = {"messages": MESSAGES}


def asked(content):
    return {"messages": [{"role": "user", "content": content}]}


def answered(**message):
    return {"messages": [{"role": "assistant", "content": "8", **message}]}


def called(*calls):
    return {"messages": [{"role": "assistant", "tool_calls": list(calls)}]}


NO_ARGUMENTS = "the call of 'f' in message 0 must have 'arguments'.* the keys .'name'"
NO_MAPPING = "'f' in message 0 must have a mapping or JSON text as 'arguments', got list"
NO_LIST = "'tool_calls' of message 0 must be a list of calls, got dict: put it into"
ONE_TEXT = "'completion' must be a list of messages as 'prompt' is, got text"
WEIGHT = "message 0 must have a finite 'weight' of at least 0, got"


@pytest.mark.parametrize(
    ("row", "error", "match"),
    [
        ([], TypeError, "a row must be a mapping with 'messages'"),
        ({"text": "a"}, ValueError, r"got the keys \['text'\]"),
        ({"prompt": "a", "completion": MESSAGES}, TypeError, "'prompt' must be a list of messages"),
        ({"prompt": MESSAGES[:1], "completion": "8"}, TypeError, ONE_TEXT),
        ({"messages": []}, ValueError, "must have at least one message"),
        ({"messages": "a"}, TypeError, "'messages' must be a list of messages, got str"),
        ({"messages": [MESSAGES[0], 3]}, TypeError, "message 1 must be a mapping, got int"),
        ({"messages": [{"content": "a"}]}, TypeError, "message 0 must have its author"),
        (asked(3), TypeError, "message 0 .user. must have text"),
        (asked([{"type": "image"}]), ValueError, "message 0 .user. must have text alone.*'image'"),
        (asked("\ud800"), ValueError, "message 0 .user. must be text that UTF-8 can encode"),
        (asked("moon"), ValueError, "the word 'moon'"),
        ({"messages": [{"role": "assistant"}]}, ValueError, "message 0 .assistant. must have a"),
        (answered(weight=-1), ValueError, f"{WEIGHT} -1"),
        (answered(weight=1e39), ValueError, f"{WEIGHT} 1e.39"),
        (answered(train="no"), TypeError, "message 0 must have true or false as 'train', got 'no'"),
        ({**GOOD, "weight": math.nan}, ValueError, "a row must have a finite 'weight'"),
        ({**GOOD, "train": "no"}, TypeError, "a row must have true or false as 'train', got 'no'"),
        (called({"function": None}), TypeError, "message 0 must have mappings with a 'function'"),
        (called({"function": {"name": "f"}}), TypeError, NO_ARGUMENTS),
        (called({"name": "f", "arguments": [1]}), TypeError, NO_MAPPING),
        (answered(tool_calls="f()"), ValueError, "'tool_calls' of message 0 must be JSON if it is"),
        (answered(tool_calls={"name": "f"}), TypeError, NO_LIST),
        ({**GOOD, "tools": {"name": "f"}}, TypeError, "'tools' must be a list of JSON .*got dict"),
        ({**GOOD, "tools": "{"}, ValueError, "'tools' must be JSON if it is text"),
        ({**GOOD, "tools": [3]}, TypeError, "'tools' must be a list of mappings, got int"),
        (
            {"messages": [MESSAGES[0], {"role": "judge", "content": "8"}]},
            *(ValueError, "refuses message 1 of 2 .role 'judge'"),
        ),
    ],
)
def test_errors_name_the_conversation_and_the_message(tokenizer, row, error, match):
    dataset = ConversationDataset([GOOD, row], tokenizer)
    assert len(dataset[0]["tokens", "full"]) == 12
    with pytest.raises(error, match=f"^conversation 1: .*{match}"):
        dataset[1]


def test_folders_of_several_splits_and_broken_files_are_refused(tokenizer, tmp_path, monkeypatch):
    table = datasets.Dataset.from_list([GOOD])
    (tmp_path / "files" / "data").mkdir(parents=True)
    for split in ("train", "test"):
        table.to_parquet(tmp_path / "files" / "data" / f"{split}-0.parquet")
    datasets.DatasetDict(train=table, test=table).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "a.parquet").write_text("{")
    for name, match in {
        "files": r"files in .*/files are of the splits \['train', 'test'\]: choose one",
        "saved": r"saved has the splits \['test', 'train'\]: choose one, such as '.*/saved/test'",
        "a.json": r"source must be a file of JSON, but .*a\.json is not",
        "a.parquet": r"source must have whole Parquet files, but .*a\.parquet cannot be read",
    }.items():
        with pytest.raises(ValueError, match=match):
            ConversationDataset(tmp_path / name, tokenizer)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(ConversationDataset("~/saved/test", tokenizer)) == 1


def test_a_broken_line_is_named(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GOOD) + "\n{torn\n")
    dataset = ConversationDataset(path, tokenizer)
    assert len(dataset[0]["tokens", "full"]) == 12
    with pytest.raises(ValueError, match=r"conversation 1: a line of .*a\.jsonl must be JSON"):
        dataset[1]


def test_indices_and_arguments_are_checked(tokenizer):
    dataset = ConversationDataset([GOOD], tokenizer)
    assert_same(dataset[-1], dataset[0])
    for index in (1, -2):
        with pytest.raises(IndexError, match="index must be below 1, the conversations"):
            dataset[index]
    with pytest.raises(ValueError, match="max_length must be"):
        ConversationDataset([GOOD], tokenizer, max_length=0)
    with pytest.raises(ValueError, match="tokenizer must be a fast one"):
        ConversationDataset([GOOD], object())


# Into training.


def test_a_loader_gives_each_conversation_once_an_epoch(tokenizer):
    talks = [{"messages": MESSAGES[: 2 + 2 * (n % 2)]} for n in range(10)]
    dataset = ConversationDataset(talks, tokenizer)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=dataset.collate)
    for _ in range(2):
        batches = list(loader)
        assert [len(rows) for rows in batches] == [4, 4, 2]
        assert sorted(n for rows in batches for n in rows["episode"].tolist()) == list(range(10))


def test_a_data_set_is_pickled(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GOOD) + "\n")
    for source in (path, [GOOD], datasets.Dataset.from_list([GOOD])):
        dataset = ConversationDataset(source, tokenizer)
        expected = dataset[0]
        assert_same(pickle.loads(pickle.dumps(dataset))[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize(("context", "workers"), [("fork", 2), ("spawn", 1)])
def test_workers_give_what_the_process_itself_gives(tokenizer, tmp_path, context, workers):
    path = tmp_path / "a.jsonl"
    talks = [{"messages": MESSAGES[: 2 + 2 * (n % 2)]} for n in range(9)]
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    dataset = ConversationDataset(path, tokenizer)
    alone = DataLoader(dataset, 4, collate_fn=dataset.collate)
    with_workers = DataLoader(
        dataset, 4, collate_fn=dataset.collate, num_workers=workers, multiprocessing_context=context
    )
    for rows, other in zip(with_workers, alone, strict=True):
        assert_same(rows, other)


def test_the_hosts_loss_takes_the_rows():
    """TorchRL's SFTLoss reads the same masks; its mean over rows of means is ``seq_mean_token_mean``."""
    model, tokenizer = tiny_chat_model(WORDS, hidden_size=32)
    dataset = ConversationDataset([GOOD, {"messages": MESSAGES[:2]}], tokenizer)
    rows = dataset.collate(list(dataset))

    def log_probs(tokens):
        found = model(input_ids=tokens).logits.log_softmax(-1)[:, :-1]
        found = found.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        return torch.nn.functional.pad(found, (1, 0))

    actor = TensorDictModule(log_probs, [("tokens", "full")], [("log_probs", "full")])
    host = SFTLoss(actor, tokenizer)
    host.set_keys(history=("tokens", "full"))
    ours = MultiTurnLoss(model, objective="sft", aggregation="seq_mean_token_mean")
    torch.testing.assert_close(host(rows).loss_sft, ours(rows)["loss_objective"])


def test_nothing_is_said_about_ordinary_conversations(tokenizer, caplog):
    with caplog.at_level(logging.INFO, "torchrl_mt"):
        list(ConversationDataset([GOOD], tokenizer))
    assert not caplog.records
