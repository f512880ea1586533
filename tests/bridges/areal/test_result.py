"""AReaL's dict of padded sequences: merged into rows, its turns are the sequences again."""

from __future__ import annotations

import math
import random

import pytest
import torch
from tensordict import TensorDict

from tests.collectors.scripted import ScriptedEngine
from tests.tiers import few_or_many
from torchrl_mt.bridges.areal import read_result
from torchrl_mt.collectors import (
    Episode,
    Limits,
    MultiTurnCollector,
    StopReason,
    Turn,
    episodes_to_tensordict,
)
from torchrl_mt.collectors.workflow import enter_result
from torchrl_mt.engines import Completion
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss
from torchrl_mt.transforms import MergeTurns

NAN = math.nan
COLUMNS = [
    *(("tokens", "full"), ("masks", "all_assistant_mask")),
    *((name, "full") for name in ("log_probs", "versions", "rewards")),
]
LEARNED = [*COLUMNS, ("turns", "full"), ("sampling", "temperature")]


def merged(turns):
    return MergeTurns()(episodes_to_tensordict([Episode(None, 0, 0, turns, StopReason.DONE)]))


def random_result(rng: random.Random) -> dict[str, torch.Tensor]:
    """Any masks whose rows have a sampled token; what is not to be read is garbage."""
    b, t = rng.randint(1, 4), rng.randint(2, 9)

    def draw(values):
        return torch.tensor([[rng.choice(values) for _ in range(t)] for _ in range(b)])

    attended = draw([0, 1, 1, 1])
    sampled = draw(rng.choice([[0, 0, 1], [0, 1], [0, 1, 1, 1], [1]]))
    ids = draw([0, 1])
    ends = []
    for row in range(b):
        first, second = sorted(rng.sample(range(t), 2))
        attended[row, [first, second]] = sampled[row, second] = 1
        ends.append(second + 1)
    if rng.random() < 0.3:  # Sequences that begin with each other, with the same masks.
        for column in (ids, attended, sampled):
            column[:] = column[0].clone()
        attended[-1, rng.randint(ends[0], t) :] = 0
    read = (attended == 1) & (sampled == 1) & (attended.cumsum(-1) > 1)
    return {
        "input_ids": torch.where(attended == 1, ids, -1),
        "attention_mask": rng.choice([attended, attended.bool(), attended.float()]),
        "loss_mask": torch.where(attended == 1, sampled, 7),
        "logprobs": torch.where(read, -torch.rand(b, t), rng.choice([NAN, 0.0, 3.0])),
        "versions": torch.where(read, torch.randint(0, 5, (b, t)), -1),
        "rewards": torch.randn(b) if rng.random() < 0.5 else torch.randint(-3, 4, (b, t)),
    }


def reference_rows(result):
    """Each row as a list of (token, sampled, log-prob, version, reward), one token after the other."""
    rows = []
    for b in range(len(result["input_ids"])):
        row, carried, last = [], 0.0, None
        for t in range(result["input_ids"].shape[1]):
            if result["attention_mask"][b, t] == 1:
                sampled = bool(row) and result["loss_mask"][b, t] == 1
                token = int(result["input_ids"][b, t])
                log_prob, version = result["logprobs"][b, t], result["versions"][b, t]
                told = [float(log_prob), int(version)] if sampled else [0.0, -1]
                row.append([token, sampled, *told, 0.0])
                last = len(row) - 1 if sampled else last
            if result["rewards"].ndim == 2:
                if last is None:
                    carried += float(result["rewards"][b, t])
                else:
                    row[last][4] += float(result["rewards"][b, t])
        del row[last + 1 :]
        first = next(k for k, token in enumerate(row) if token[1])
        row[first][4] += carried
        if result["rewards"].ndim == 1:
            row[last][4] = float(result["rewards"][b])
        # A turn's reward is on its last token.
        for k in range(len(row) - 1):
            if row[k][1] and row[k + 1][1]:
                row[k + 1][4] += row[k][4]
                row[k][4] = 0.0
        rows.append(row)
    return rows


def as_lists(rows):
    lengths = rows["masks", "all_attention_mask"].sum(-1).tolist()
    columns = [rows[key].tolist() for key in COLUMNS]
    return [
        [list(token) for token in zip(*(column[n][:length] for column in columns), strict=True)]
        for n, length in enumerate(lengths)
    ]


def contexts(rows):
    """What each sampled token is and came after, in any order of the rows."""
    return sorted(
        ([t[0] for t in row[:k]], *row[k][:4]) for row in rows for k in range(len(row)) if row[k][1]
    )


def goes_on_elsewhere(turns):
    """Whether the longest earlier turn that one goes on from is not the last: of another sequence."""
    whole = [[*turn.prompt_ids, *turn.completion.token_ids] for turn in turns]
    for n, turn in enumerate(turns):
        prompt = list(turn.prompt_ids)
        fit = [k for k in range(n) if prompt[: len(whole[k])] == whole[k]]
        if fit and len(whole[fit[-1]]) < max(len(whole[k]) for k in fit):
            return True
    return False


@few_or_many(60, 500)
def test_merged_turns_are_the_sequences(examples):
    elsewhere = 0
    for seed in range(examples):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        result = random_result(rng)
        turns = read_result(result, [], version=9)
        found, expected = as_lists(merged(turns)), reference_rows(result)
        assert contexts(found) == contexts(expected)
        if goes_on_elsewhere(turns):  # Then a sequence is two rows, with the same tokens.
            elsewhere += 1
            continue
        assert [[t[:4] for t in row] for row in found] == [[t[:4] for t in row] for row in expected]
        for row, other in zip(found, expected, strict=True):
            assert [t[4] for t in row] == pytest.approx([t[4] for t in other], abs=1e-6)
        # A turn for each run of sampled tokens.
        assert len(turns) == sum(
            row[k][1] and not row[k - 1][1] for row in expected for k in range(1, len(row))
        )
    assert elsewhere <= examples // 10


def one(**changes):
    """Two turns in one sequence; ``None`` leaves a key out."""
    result = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9]], dtype=torch.int32),
        "attention_mask": torch.ones(1, 5, dtype=torch.bool),
        "loss_mask": torch.tensor([[0, 1, 1, 0, 1]], dtype=torch.int32),
        "logprobs": torch.tensor([[0.0, -1.0, -2.0, 0.0, -3.0]]),
        "versions": torch.tensor([[-1, 0, 1, -1, 1]], dtype=torch.int32),
        "rewards": torch.tensor([2.0]),
    }
    return {key: value for key, value in {**result, **changes}.items() if value is not None}


def recorded(prompt, tokens, **sampling):
    """A turn of the engine."""
    ones = [-1.0] * len(tokens), [0] * len(tokens)
    completion = Completion(tokens, *ones, "length", sampling=sampling)
    messages = [{"role": "assistant", "content": str(tokens)}]
    return Turn(prompt, completion, messages=messages, model_seconds=2.0)


def entered(result, *turns):
    """An episode that recorded turns and was returned a result."""
    episode = Episode(None, turns=list(turns))
    enter_result(episode, result, 0)
    return episode


def test_the_prompts_of_a_sequence_share_its_tokens():
    """However many turns a long sequence has, its tokens are kept once."""
    first, second = read_result(one(), [], version=0)
    assert first.prompt_ids.line is second.prompt_ids.line
    assert [*second.prompt_ids] == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_mask": None}, "must have 'attention_mask'"),
        ({"rewards": None}, "must have 'rewards'.*zeros"),
        ({"loss_mask": None, "logprobs": None}, "must have 'loss_mask', or 'logprobs'"),
        ({"loss_masks": torch.ones(1, 5)}, "may have input_ids, .*got 'loss_masks'"),
        ({"input_ids": [[5, 6, 7, 8, 9]]}, "'input_ids' must be a tensor, got list"),
        ({"input_ids": torch.arange(5)}, r"'input_ids' must have shape \[B, T\].*unsqueeze"),
        ({"input_ids": torch.zeros(0, 5).long()}, r"'input_ids' must have .* got \[0, 5\]"),
        ({"input_ids": torch.rand(1, 5)}, "'input_ids' must hold integers, got torch.float32"),
        ({"input_ids": torch.tensor([[5, 6, -7, 8, 9]])}, "'input_ids' must be 0 or more.*-7"),
        ({"attention_mask": torch.ones(5)}, r"'attention_mask' must have shape \[1, 5\]"),
        ({"attention_mask": torch.full((1, 5), 2)}, "'attention_mask' must be 0 or 1, got 2"),
        ({"attention_mask": torch.zeros(1, 5)}, "'attention_mask' .* none in row 0"),
        ({"loss_mask": torch.full((1, 5), 0.5)}, "'loss_mask' must be 0 or 1, got 0.5 in row 0"),
        ({"loss_mask": torch.full((1, 5), NAN)}, "'loss_mask' must be 0 or 1, got nan"),
        ({"loss_mask": torch.zeros(1, 5)}, "'loss_mask' .* got none in row 0"),
        ({"loss_mask": torch.tensor([[1, 0, 0, 0, 0]])}, "'loss_mask' .* got none in row 0"),
        ({"logprobs": torch.ones(1, 5)}, "'logprobs' must be finite and 0 or less.*1.0 in row 0"),
        ({"logprobs": torch.full((1, 5), NAN)}, "'logprobs' must be finite.*leave it out"),
        ({"logprobs": torch.zeros(1, 5).long()}, "'logprobs' must hold floating numbers"),
        ({"logprobs": torch.zeros(1, 4)}, r"'logprobs' must have shape \[1, 5\] .*\[1, 4\]"),
        ({"versions": torch.full((1, 5), -1)}, "'versions' must be 0 or more.* -1 in row 0"),
        ({"versions": torch.zeros(1, 5)}, "'versions' must hold integers"),
        ({"rewards": torch.zeros(2)}, r"'rewards' must have shape \[1\] or \[1, 5\] .*\[2\]"),
        ({"rewards": torch.tensor(1.0)}, r"'rewards' must have shape .* got \[\]"),
        ({"rewards": torch.tensor([NAN])}, "'rewards' must be finite, as float32, got nan"),
        ({"rewards": torch.full((1, 5), 1e39, dtype=torch.float64)}, "'rewards' must be finite"),
        ({"rewards": torch.ones(1, dtype=torch.complex64)}, "'rewards' must hold real numbers"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, message):
    played = [Turn([1], Completion([2], [-1.0], [0], "stop"))]
    episode = Episode(None, turns=list(played))
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        enter_result(episode, one(**changes), 0)
    assert str(caught.value).endswith(".")
    assert episode.turns == played


def test_missing_columns_have_plain_values():
    turns = read_result(one(versions=None, loss_mask=None), [], version=3)
    assert [turn.completion.token_ids for turn in turns] == [[6, 7, 8, 9]]
    assert turns[0].completion.versions == [3] * 4
    turns = read_result(one(logprobs=None), [], version=3)
    assert [list(turn.prompt_ids) for turn in turns] == [[5], [5, 6, 7, 8]]
    assert all(math.isnan(value) for turn in turns for value in turn.completion.log_probs)


def test_a_tensordict_is_read_like_a_dict():
    episode = entered(TensorDict(one(), [1]))
    assert [turn.completion.token_ids for turn in episode.turns] == [[6, 7], [9]]
    assert [turn.reward for turn in episode.turns] == [0.0, 2.0]


def test_a_ted_tensordict_may_have_tokens_of_its_own():
    result = {"next": {"reward": torch.ones(1, 1)}, "input_ids": torch.ones(1, 3)}
    episode = entered(TensorDict(result, [1]), recorded([1], [2]))
    assert episode.turns[0].reward == 1.0
    assert "input_ids" in episode.entries


@pytest.mark.parametrize(("others", "known"), [([0.5, 0.5], 0.5), ([0.5, 0.7], NAN), ([], 1.0)])
def test_what_the_engine_recorded_is_kept_where_it_fits(others, known):
    calls = [recorded([5], [6, 8], temperature=t) for t in others]
    episode = entered(one(), *calls)
    found = episodes_to_tensordict([episode])["sampling", "temperature"].tolist()
    assert found == pytest.approx([known, known], nan_ok=True)
    first, second = entered(one(), *calls, recorded([5], [6, 7], temperature=0.25)).turns
    assert first.completion.sampling == {"temperature": 0.25}
    assert (first.completion.finish_reason, first.model_seconds) == ("length", 2.0)
    assert first.messages == [{"role": "assistant", "content": "[6, 7]"}]
    assert first.completion.log_probs == [-1.0, -2.0]  # the result's own
    assert second.messages == []
    expected = pytest.approx(NAN if others else 0.25, nan_ok=True)
    assert second.completion.sampling["temperature"] == expected


def test_a_recorded_call_with_another_prompt_is_another():
    first = entered(one(), recorded([4], [6, 7])).turns[0]
    assert first.messages == []
    assert list(first.prompt_ids) == [5]


class Returns:
    """Returns a result without a call of the engine."""

    def __init__(self, result):
        self.result = result

    async def arun_episode(self, engine, data):
        return self.result


def collect(workflow, engine, n=2, **kwargs):
    with MultiTurnCollector(workflow, engine, episodes_per_batch=n, **kwargs) as collector:
        return next(iter(collector)), collector.stats()


def test_a_workflow_need_not_call_the_engine(engine):
    engine.version = 6
    result = one(versions=None)
    result = {key: torch.cat([value, value]) for key, value in result.items()}
    batch, stats = collect(Returns(result), engine)
    assert not engine.calls
    assert batch["turn", "parent"].tolist() == [-1, 0, -1, 2] * 2
    assert batch["next", "reward"].flatten().tolist() == [0, 2, 0, 2] * 2
    assert stats["forks"] == 2
    rows = MergeTurns()(batch)
    assert rows["tokens", "full"].tolist() == [[5, 6, 7, 8, 9]] * 4
    assert rows["versions", "full"].tolist() == [[-1, 6, 6, -1, 6]] * 4
    assert rows["fork"].tolist() == [0, 1, 0, 1]


def test_a_wrong_dict_is_a_failure_that_names_the_key(engine):
    with pytest.raises(RuntimeError, match="'attention_mask' must have shape"):
        collect(Returns(one(attention_mask=torch.ones(2, 5))), engine, max_consecutive_failures=1)
    with pytest.raises(RuntimeError, match="return a dict with 'input_ids'"):
        collect(Returns({"reward": 1.0}), engine, max_consecutive_failures=1)
    with pytest.raises(TypeError, match=r"got dict .* A workflow's dict must have 'input_ids'"):
        entered({"reward": 1.0}, recorded([1], [2]))


class UntilRight:
    """Asks until the answer is right, and returns one sequence with a discounted reward."""

    def __init__(self, reward_fn, tokenizer, max_turns=3, turn_discount=0.5):
        self.reward_fn, self.tokenizer = reward_fn, tokenizer
        self.max_turns, self.turn_discount = max_turns, turn_discount
        self.again = [*tokenizer.encode("invalid"), tokenizer.eos_token_id]

    async def arun_episode(self, engine, data):
        tokens = self.tokenizer.encode(data["question"])
        mask, log_probs, versions = ([fill] * len(tokens) for fill in (0, 0.0, -1))
        for turn in range(self.max_turns):
            if turn:
                tokens = tokens + self.again
                for column, fill in ((mask, 0), (log_probs, 0.0), (versions, -1)):
                    column += [fill] * len(self.again)
            answer = await engine.generate(tokens, max_new_tokens=4)
            tokens = [*tokens, *answer.token_ids]
            mask += [1] * len(answer.token_ids)
            log_probs += answer.log_probs
            versions += answer.versions
            reward = self.reward_fn(answer.token_ids)
            if reward:
                break
        return {
            "input_ids": torch.tensor([tokens], dtype=torch.int32),
            "loss_mask": torch.tensor([mask], dtype=torch.int32),
            "logprobs": torch.tensor([log_probs]),
            "versions": torch.tensor([versions], dtype=torch.int32),
            "attention_mask": torch.ones(1, len(tokens), dtype=torch.bool),
            "rewards": torch.tensor([reward * self.turn_discount**turn]),
        }


class UntilRightOurs(UntilRight):
    """The same, and the ledger is the engine's."""

    async def arun_episode(self, engine, data):
        result = await super().arun_episode(engine, data)
        return float(result["rewards"])


def rows_of(workflow, tokenizer, **kwargs):
    def rule(prompt):
        return [4 + sum(prompt) % 7, tokenizer.eos_token_id]

    engine = ScriptedEngine(tokenizer, rule)
    data = [{"question": "guess 1"}, {"question": "guess 2"}]
    batch, _ = collect(workflow, engine, 4, data=data, group_size=2, max_concurrency=1, **kwargs)
    return MergeTurns()(batch)


def test_the_dict_is_worth_as_much_as_the_ledger(tokenizer):
    def judge(ids):
        return float(ids[0] == 5)

    ours = rows_of(UntilRightOurs(judge, tokenizer), tokenizer)
    rows = rows_of(UntilRight(judge, tokenizer), tokenizer)
    assert rows["turns", "full"].max() > 0
    for key in LEARNED:
        assert torch.equal(rows[key], ours[key]), key


def test_a_limit_that_the_workflow_lets_through_keeps_the_recorded_turns(tokenizer):
    never = UntilRight(lambda ids: 0.0, tokenizer)
    rows = rows_of(never, tokenizer, limits=Limits(max_turns=2))
    assert rows["turns", "full"].amax(-1).tolist() == [1] * 4


def test_without_log_probs_the_actor_scores_the_rows(model):
    rows = merged(read_result(one(logprobs=None), [], version=0))
    with pytest.raises(ValueError, match=r"no 'logprobs'.*old_log_probs='actor'"):
        ExperienceMaker(model)(rows)
    rows = ExperienceMaker(model, old_log_probs="actor")(rows)
    assert rows["log_probs", "old"].isfinite().all()
    assert MultiTurnLoss(model)(rows)["loss_objective"].isfinite()
    with pytest.raises(ValueError, match=r"\('log_probs', 'full'\).*finite.*no correction"):
        MultiTurnLoss(model, correction="token_tis")(rows)
