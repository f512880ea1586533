"""A clean batch passes, and each planted fault is found where it is, by the checks that concern it."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tests.buffers import buffer_of
from tests.collectors.test_dump import played
from tests.refusals import check_refused, refused
from torchrl_mt.audit import audit_rows
from torchrl_mt.audit.__main__ import main
from torchrl_mt.collectors import (
    Episode,
    MultiTurnCollector,
    StopReason,
    Turn,
    episodes_to_tensordict,
)
from torchrl_mt.collectors.dump import EpisodeDump, episode_records
from torchrl_mt.datasets import save_episodes
from torchrl_mt.engines import Completion, TransformersEngine
from torchrl_mt.envs import GuessNumber
from torchrl_mt.transforms import MergeTurns

FULL, MASK = ("tokens", "full"), ("masks", "all_assistant_mask")
LOG_PROBS, VERSIONS = ("log_probs", "full"), ("versions", "full")
OTHER_KEYS = (("masks", "all_attention_mask"), ("turns", "full"))
NEW = 99
"""A token that no episode has."""


@st.composite
def batches(draw):
    """Episodes with their own ids, versions that do not fall, and a log-probability for each token."""
    episodes = draw(st.lists(played(), min_size=1, max_size=3))
    for number, episode in enumerate(episodes):
        episode.traj_id = 10 + number
        for k, turn in enumerate(episode.turns):
            ids = turn.completion.token_ids
            values = [-0.125 * (j + 1) - k for j in range(len(ids))]
            turn.completion = Completion(ids, values, [number + 2 * k] * len(ids), "stop")
    assume(any(episode.num_tokens for episode in episodes))
    return episodes


def rows_of(episodes):
    return MergeTurns()(episodes_to_tensordict(episodes))


def records_of(episodes):
    return [record for episode in episodes for record in episode_records(episode)]


def trl(rows, *, start=1):
    """Rows as TRL has them: cut after ``start`` tokens into prompts and completions."""
    cut = {key: value[:, start:] for key, value in columns(rows).items()}
    return {
        "prompt_ids": rows[FULL][:, :start],
        "prompt_mask": columns(rows)["attention"][:, :start],
        "completion_ids": cut["tokens"],
        "completion_mask": cut["attention"],
        "tool_mask": cut["mask"],
        "sampling_per_token_logps": cut["log_probs"],
    }


def verl(rows, *, start=1):
    """Rows as verl has them."""
    entries = columns(rows)
    return {
        "prompts": entries["tokens"][:, :start],
        "input_ids": entries["tokens"],
        "attention_mask": entries["attention"],
        "responses": entries["tokens"][:, start:],
        "response_mask": entries["mask"][:, start:],
        "rollout_log_probs": entries["log_probs"][:, start:],
    }


def columns(rows):
    return {
        "tokens": rows[FULL],
        "attention": rows["masks", "all_attention_mask"].long(),
        "mask": rows[MASK].long(),
        "log_probs": rows[LOG_PROBS],
    }


def left_padded(rows):
    """The same rows, with padding on the left."""
    out = rows.clone()
    for k, kept in enumerate(rows["masks", "all_attention_mask"].sum(1).tolist()):
        for key in (FULL, MASK, *OTHER_KEYS, LOG_PROBS, VERSIONS):
            out[key][k] = rows[key][k].roll(rows[FULL].shape[1] - kept)
    return out


def failed(report):
    return {found.check for found in report if found.ok is False}


def named(report):
    return {found.check: found for found in report}


FORMS = {"rows": lambda rows: rows, "left": left_padded, "trl": trl, "verl": verl}
SAMPLED = {"batch": episodes_to_tensordict, "dump": records_of, "trl": lambda e: trl(rows_of(e))}
forms, sources = st.sampled_from([*FORMS]), st.sampled_from([*SAMPLED])


@settings(max_examples=25)
@given(batches(), forms, sources, st.randoms())
def test_what_was_merged_is_clean(episodes, form, source, random):
    rows = rows_of(episodes)
    order = random.sample(range(len(rows)), len(rows))
    report = audit_rows(FORMS[form](rows[order]), SAMPLED[source](episodes))
    assert report.ok, str(report)
    of = named(report)
    assert of["never trained"].ok
    assert of["never sampled"].ok
    assert of["trained once"].ok
    assert of["log-probs as sampled"].ok
    assert of["retokenised"].ok
    assert not of["left out"].count
    has_versions = form in ("rows", "left") and source != "trl"
    assert of["versions as sampled"].ok is (True if has_versions else None)
    alone = audit_rows(FORMS[form](rows))
    assert alone.ok, str(alone)
    assert "not checked" in str(named(alone)["never trained"])


KINDS = ["mask", "shift", "env", "padding", "token", "log_prob", "version", "fork", "twice"]
KINDS += ["dropped"]


def planted(draw, kind, rows):
    """Plant a fault; return the rows, the checks that must and may fail, and where."""
    trained, attended = rows[MASK], rows["masks", "all_attention_mask"]
    keys = [tuple(rows[FULL][i, : k + 1].tolist()) for i, k in trained.nonzero().tolist()]
    unique = [
        at for at, key in zip(trained.nonzero().tolist(), keys, strict=True) if keys.count(key) == 1
    ]
    forks = [
        (i, k)
        for i, k in (attended & ~trained).nonzero().tolist()
        if tuple(rows[FULL][i, : k + 1].tolist()) in keys
    ]
    free = (attended & ~trained)[:, 1:].nonzero().tolist()
    others = {
        "env": [(i, k + 1) for i, k in free if (i, k + 1) not in forks],
        "fork": [
            (i, k)
            for i, k in forks
            if any(
                trained[j, k]
                and rows["episode"][j] == rows["episode"][i]
                and torch.equal(rows[FULL][j, : k + 1], rows[FULL][i, : k + 1])
                for j in range(len(rows))
            )
        ],
        "padding": (~attended).nonzero().tolist(),
    }
    places = others.get(kind, unique)
    assume(places)
    i, k = draw(st.sampled_from(places))
    must = may = set()
    if kind == "mask":
        trained[i, k] = False
        must, may = {"never trained"}, {"masks"}  # If nothing else is trained.
    elif kind == "shift":
        trained[i] = trained[i].roll(1)
        must = {"never trained"}
        may = {"masks", "versions", "never sampled", "trained once", "retokenised"}
        k = None
    elif kind in ("env", "fork", "padding"):
        trained[i, k] = True
        rows[VERSIONS][i, k] = rows[VERSIONS][i].max().clamp(min=0)
        must = {{"env": "never sampled", "fork": "trained once", "padding": "masks"}[kind]}
        may = {"versions"}
    elif kind == "token":
        rows[FULL][i, k] = NEW
        must = {"retokenised"}
    elif kind == "log_prob":
        rows[LOG_PROBS][i, k] -= 0.5
        must = {"log-probs as sampled"}
    elif kind == "version":
        rows[VERSIONS][i, k] += 1
        must, may = {"versions as sampled"}, {"versions"}
    elif kind == "twice":
        rows = torch.cat([rows, rows[i : i + 1]])
        i, k, must = len(rows) - 1, None, {"trained once", "duplicates"}
    else:
        rows = torch.cat([rows[:i], rows[i + 1 :]])
        assume(rows[MASK].any())
        may = {"never trained"}
    return rows, must, may, (i, k)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(st.data(), batches(), forms, sources)
def test_faults_are_found_where_they_are(kind, data, episodes, form, source):
    whole = rows_of(episodes)
    rows, must, may, (i, k) = planted(data.draw, kind, whole.clone())
    if form in ("trl", "verl"):
        assume(kind not in ("version", "padding"))
        must -= {"duplicates"}
    assume(kind != "version" or source != "trl")
    report = audit_rows(FORMS[form](rows), SAMPLED[source](episodes))
    of = named(report)
    assert must <= failed(report) <= must | may, str(report)
    if kind == "dropped":
        assert of["left out"].count or of["never trained"].count
    for check in must - {"never trained", "duplicates", "masks"}:
        assert of[check].first.row == i, str(report)
        assert k is None or of[check].first.token == k
    if kind == "mask":
        assert (of["never trained"].count, of["never trained"].first.token) == (1, k)


@settings(max_examples=10)
@given(batches())
def test_every_source_is_read_alike(tmp_path_factory, episodes):
    folder, batch = tmp_path_factory.mktemp("audit"), episodes_to_tensordict(episodes)
    rows = MergeTurns()(batch)
    EpisodeDump(folder / "dump").write(episodes)
    buffer = buffer_of(100)
    buffer.extend(batch)
    save_episodes(buffer, folder / "set.jsonl")
    rows.select("tokens", "masks", "log_probs", "versions", "turns", "episode", "fork").save(
        folder / "rows"
    )
    torch.save(trl(rows), folder / "trl.pt")
    torch.save(rows.select("tokens", "masks", "episode").to_dict(), folder / "rows.pt")
    paths = [folder / name for name in ("dump", "set.jsonl", "rows", "trl.pt", "rows.pt")]
    for source in [buffer, buffer._storage, *paths, str(paths[0])]:
        report = audit_rows(source, batch)
        assert report.ok, str(report)
        assert not named(report)["left out"].count


def test_rows_tell_some_faults_by_themselves():
    sampled = [
        Completion([5, 6], [-0.5, -1.0], [2, 3], "stop"),
        Completion([7], [-0.5], [3], "stop"),
    ]
    turns = [Turn([1], sampled[0]), Turn([1, 5, 6, 2], sampled[1]), Turn([1, 5, 6, 3], sampled[1])]
    rows = rows_of([Episode(None, 0, 4, turns, StopReason.DONE)])
    assert audit_rows(rows).ok
    again = rows.clone()
    again[MASK][1, 1:3] = True
    found = named(audit_rows(again))["trained once"]
    assert (found.ok, found.count) == (False, 2)
    assert str(found.first) == "row 1, episode 4, turn 2, token 1: 5"
    for key, value in ((LOG_PROBS, 0.5), (LOG_PROBS, torch.nan), (VERSIONS, -1), (VERSIONS, 0)):
        broken = rows.clone()
        broken[key][0, 2] = value
        assert failed(audit_rows(broken)) == {"log-probs" if key is LOG_PROBS else "versions"}
    first = rows.clone()
    first[MASK][0, 0] = True
    assert "masks" in failed(audit_rows(first))
    assert failed(audit_rows(torch.cat([rows, rows[:1]]))) == {"duplicates", "trained once"}
    other = rows.clone()
    other["episode"] += 1
    noted = str(named(audit_rows(torch.cat([rows, other])))["equal rows"])
    assert noted.split()[:4] == ["noted", "equal", "rows", "2"]


def test_a_model_recomputes_what_it_sampled(model, tokenizer):
    engine = TransformersEngine(model, tokenizer, max_new_tokens=2)
    env = partial(GuessNumber, turns=3)
    with MultiTurnCollector(env, engine, [None], episodes_per_batch=4) as collector:
        batch = next(iter(collector))
    rows = MergeTurns()(batch)
    found = named(audit_rows(rows, batch, model=model, tokenizer=tokenizer, tolerance=1e-4))
    assert found["recomputed"].ok, str(found["recomputed"])
    assert found["encoded again"].ok is None
    assert found["retokenised"].ok
    rows[VERSIONS] += rows[MASK]
    mixed = torch.cat([rows, rows])
    mixed[VERSIONS][: len(rows)] -= rows[MASK].long()
    mixed[LOG_PROBS][: len(rows)] -= rows[MASK].float()  # The older version need not agree.
    text = str(named(audit_rows(mixed, model=model))["recomputed"])
    assert text.startswith("passed")
    assert "of version 1 median" in text
    assert "50.0% beyond" in text
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    found = named(audit_rows(rows, model=model))["recomputed"]
    assert not found.ok
    assert found.count > 0
    assert "the model should be version 1" in found.text
    with pytest.raises(ValueError, match="model must know all tokens, got 99"):
        audit_rows({**trl(rows), "prompt_ids": torch.full((len(rows), 1), NEW)}, model=model)
    rows["sampling", "temperature"][0] = torch.nan
    assert "several temperatures" in str(named(audit_rows(rows, model=model))["recomputed"])


def test_rows_of_nothing_are_no_error():
    nothing = Episode(None, 0, 4, [Turn([1], Completion([], [], [], "stop"))], StopReason.DONE)
    rows = trl(rows_of([nothing]))
    assert failed(audit_rows(rows, [*records_of([nothing])])) == {"masks"}
    for key in ("prompt_mask", "completion_mask"):
        rows[key] = torch.zeros_like(rows[key])
    assert failed(audit_rows(rows, rows)) == {"masks"}


TORN = {"input_ids": torch.ones(1, 2), "responses": torch.zeros(1, 1)}


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused("rows must be a path…got int", audit_rows, 3, error=TypeError),
        refused("rows: …/nowhere", audit_rows, "/nowhere", error=FileNotFoundError),
        refused(
            "must have 'completion_ids'…NoneType", audit_rows, {"prompt_ids": torch.ones(1, 1)}
        ),
        refused("last columns", audit_rows, TORN),
        refused("rows or whole episodes", audit_rows, TensorDict(a=torch.ones(2), batch_size=[2])),
        refused("'token_ids'", audit_rows, [{"prompt_len": 1}]),
        refused("at least one row", audit_rows, []),
    ],
)
def test_bad_input_is_named(call, error, text):
    check_refused(call, error, text)


@pytest.mark.slow
def test_the_command_says_by_its_status_what_it_found(tmp_path, capsys):
    turn = Turn([1, 2], Completion([3, 4], [-0.5, -0.5], [7, 7], "stop"))
    episode = Episode(None, 0, 4, [turn], StopReason.DONE)
    EpisodeDump(tmp_path / "dump").write([episode])
    rows = trl(rows_of([episode]), start=2)
    torch.save(rows, tmp_path / "good.pt")
    rows["tool_mask"][0, 1] = 0
    torch.save(rows, tmp_path / "bad.pt")
    (tmp_path / "torn.pt").write_bytes(b"no tensors")
    for name, status, text in (("good", 0, "passed"), ("torn", 2, "error: rows")):
        assert main([f"{tmp_path}/{name}.pt", "--sampled", f"{tmp_path}/dump"]) == status
        printed = capsys.readouterr()
        assert text in printed.out + printed.err
    command = [sys.executable, "-m", "torchrl_mt.audit", "bad.pt", "--sampled", "dump"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "token 3: 4" in done.stdout
