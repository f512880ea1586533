"""Interactions: every call or every branch, and rewards that flow back along branches only."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from tests.collectors.runs import first_batch
from tests.collectors.scripted import ScriptedEngine
from tests.refusals import check_refused, refused
from tests.tiers import few_or_many
from torchrl_mt.agents import export_interactions
from torchrl_mt.bridges.areal import read_result
from torchrl_mt.collectors import Episode, StopReason, Turn, episodes_to_tensordict
from torchrl_mt.engines import Completion
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.transforms import MergeTurns


def random_turns(rng: random.Random, forks: float = 0.3) -> list[Turn]:
    """Turns that go on from any earlier one, or from none; ``forks=0`` lets no two go on from one.

    Every prompt begins with a token of its own, or goes on with one, so that the tree is known.
    """
    turns: list[Turn] = []
    for k in range(rng.randint(1, 9)):
        free = [j for j in range(k) if forks or all(turn.parent != j for turn in turns)]
        parent = rng.choice([-1, *free]) if rng.random() < 0.8 else -1
        prompt = []
        if parent >= 0:
            before = turns[parent]
            prompt = [*before.prompt_ids, *before.completion.token_ids]
        prompt += [100 + k, *rng.choices(range(3), k=rng.randint(0, 2))]
        size = rng.randint(1, 3)
        ids, log_probs = rng.choices(range(3), k=size), [-(k + i / 4) for i in range(size)]
        answer = Completion(ids, log_probs, [rng.randrange(4)] * size, "stop")
        turns.append(Turn(prompt, answer, reward=float(rng.randint(-2, 2))))
        turns[-1].parent = parent
    return turns


def session(turns, **changes):
    """What is read of a session."""
    ids = [f"chatcmpl-{k}" for k in range(len(turns))]
    asked = [{"messages": [{"role": "user", "content": f"question {k}"}]} for k in range(len(ids))]
    said = [{"role": "assistant", "content": f"answer {k}"} for k in range(len(ids))]
    transcript = [
        {"request": request, "response": {"id": id, "choices": [{"message": message}]}}
        for request, id, message in zip(asked, ids, said, strict=True)
    ]
    known = {"turns": lambda: turns, "completion_ids": ids, "transcript": transcript}
    return SimpleNamespace(**{**known, **changes})


def reference_return(turns, k, discount):
    after = [j for j, turn in enumerate(turns) if turn.parent == k]
    return turns[k].reward + discount * sum(reference_return(turns, j, discount) for j in after)


@few_or_many(20, 750)
def test_every_call_has_its_return_along_its_branches(examples):
    for seed in range(examples):
        rng = random.Random(seed)
        turns = random_turns(rng)
        discount = rng.choice([0.0, 0.5, 1.0])
        found = export_interactions(session(turns), discount=discount)
        assert list(found) == [f"chatcmpl-{k}" for k in range(len(turns))]
        for k, (turn, call) in enumerate(zip(turns, found.values(), strict=True)):
            assert call.reward == reference_return(turns, k, discount)
            assert call.messages == [{"role": "user", "content": f"question {k}"}]
            assert call.answer == {"role": "assistant", "content": f"answer {k}"}
            assert call.id == f"chatcmpl-{k}"
            assert call.parent_id == (None if turn.parent < 0 else f"chatcmpl-{turn.parent}")
            row = {key: value[0].tolist() for key, value in call.to_tensor_dict().items()}
            given, answer = list(turn.prompt_ids), turn.completion
            zeros = [0] * len(given)
            assert row["input_ids"] == [*given, *answer.token_ids]
            assert row["loss_mask"] == [*zeros, *[1] * len(answer.token_ids)]
            assert row["logprobs"] == [*zeros, *answer.log_probs]
            assert row["versions"] == [*[-1] * len(given), *answer.versions]
            assert all(row["attention_mask"])
            assert row["rewards"] == call.reward
        if discount == 1.0:
            total = sum(call.reward for call in found.values() if call.parent_id is None)
            assert total == sum(turn.reward for turn in turns)


@few_or_many(20, 750)
def test_every_branch_is_a_row_of_all_its_calls(examples):
    for seed in range(examples):
        rng = random.Random(seed)
        turns = random_turns(rng)
        found = export_interactions(session(turns), style="concat", discount=0.5)
        parents = {turn.parent for turn in turns}
        leaves = [k for k in range(len(turns)) if k not in parents]
        assert list(found) == [f"chatcmpl-{k}" for k in leaves]
        for k, branch in zip(leaves, found.values(), strict=True):
            path = [turns[k]]
            while path[0].parent >= 0:
                path.insert(0, turns[path[0].parent])
            before = [turns.index(turn) for turn in path[:-1]]
            assert [call.id for call in branch.branch] == [f"chatcmpl-{j}" for j in before]
            tokens, mask, log_probs, versions = [], [], [], []
            for turn in path:
                new = turn.prompt_ids[len(tokens) :]
                size = len(turn.completion.token_ids)
                tokens += [*new, *turn.completion.token_ids]
                mask += [0] * len(new) + [1] * size
                log_probs += [0.0] * len(new) + turn.completion.log_probs
                versions += [-1] * len(new) + turn.completion.versions
            row = {key: value[0].tolist() for key, value in branch.to_tensor_dict().items()}
            assert row == {
                "input_ids": tokens,
                "attention_mask": [True] * len(tokens),
                "loss_mask": mask,
                "logprobs": log_probs,
                "versions": versions,
                "rewards": sum(turn.reward for turn in path),
            }


@few_or_many(10, 250)
def test_branches_that_share_nothing_are_the_rows_of_the_episode(examples):
    keys = [("tokens", "full"), ("masks", "all_assistant_mask"), ("log_probs", "full")]
    keys += [("versions", "full")]
    for seed in range(examples):
        turns = random_turns(random.Random(seed), forks=0.0)
        episode = Episode(None, 0, 0, turns, StopReason.DONE)
        rows = MergeTurns()(episodes_to_tensordict([episode]))
        found = []
        for branch in export_interactions(episode, style="concat").values():
            read = read_result(branch.to_tensor_dict(), [], version=0)
            part = Episode(None, 0, 0, read, StopReason.DONE)
            found += [MergeTurns()(episodes_to_tensordict([part]))]
        assert sorted(lists(rows, keys)) == sorted(
            line for row in found for line in lists(row, keys)
        )


def lists(rows, keys):
    length = rows["masks", "all_attention_mask"].sum(-1).tolist()
    return [[rows[key][n, :t].tolist() for key in keys] for n, t in enumerate(length)]


def test_tensors_have_the_types_of_areal():
    turn = Turn([1], Completion([2], [-1.0], [0], "stop"))
    (call,) = export_interactions(session([turn])).values()
    row = call.to_tensor_dict()
    expected = dict.fromkeys(("input_ids", "loss_mask", "versions"), (torch.int64, (1, 2)))
    expected |= {"attention_mask": (torch.bool, (1, 2)), "logprobs": (torch.float32, (1, 2))}
    expected["rewards"] = (torch.float32, (1,))
    assert {key: (value.dtype, tuple(value.shape)) for key, value in row.items()} == expected


def test_several_choices_of_one_request_and_completions_of_text_are_told_apart():
    turns = [Turn([1], Completion([k], [-1.0], [0], "stop")) for k in (2, 3, 4, 5)]
    answers = [{"role": "assistant", "content": text} for text in "ab"]
    transcript = [
        {
            "request": {"messages": [{"role": "user", "content": "?"}]},
            "response": {"id": "one", "choices": [{"message": answer} for answer in answers]},
        },
        {"request": {"prompt": [1]}, "response": {"id": "two", "choices": [{"text": "c"}]}},
    ]
    # The last turn's response is not made yet.
    ids = ["one", "one", "two", ""]
    found = export_interactions(session(turns, completion_ids=ids, transcript=transcript))
    assert list(found) == ["one", "one/1", "two", "3"]
    contents = [call.answer and call.answer["content"] for call in found.values()]
    assert contents == ["a", "b", "c", None]
    assert [list(call.messages) for call in found.values()][2:] == [[], []]


class TwoQuestions(TextEnv):
    def reset(self, data):
        self.asked = 1
        return [{"role": "user", "content": "guess"}]

    def step(self, response):
        self.asked += 1
        said = [{"role": "user", "content": "higher"}]
        return TextStep(said, reward=float(self.asked), done=self.asked == 3)


def test_an_episode_and_its_tensordict_export_alike(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda prompt: [5, tokenizer.eos_token_id])
    batch, _ = first_batch(TwoQuestions, engine, n=2)
    one = batch[batch["collector", "traj_ids"] == batch["collector", "traj_ids"][0]]
    found = export_interactions(one, discount=0.5)
    assert [call.reward for call in found.values()] == [3.5, 3.0]
    assert [call.parent_id for call in found.values()] == [None, "0"]
    assert all(call.answer["content"] == "to" for call in found.values())
    said = [[message["content"] for message in call.messages] for call in found.values()]
    assert said == [["guess"], ["guess", "to", "higher"]]
    (branch,) = export_interactions(one, style="concat").values()
    row = MergeTurns()(one)
    tensors = branch.to_tensor_dict()
    assert torch.equal(tensors["input_ids"], row["tokens", "full"])
    assert torch.equal(tensors["loss_mask"].bool(), row["masks", "all_assistant_mask"])
    # Without what a collector adds, parents are found by comparison.
    for key in ("turn", "text", "info", "collector"):
        del one[key]
    assert [call.parent_id for call in export_interactions(one).values()] == [None, "0"]
    for key in (("next", "done"), ("collector", "traj_ids")):  # either tells
        with pytest.raises(ValueError, match="must be one episode, got a TensorDict with several"):
            export_interactions(batch.exclude(key))


def test_ids_of_completions_are_kept_with_the_turns():
    turns = [Turn([1], Completion([2], [-1.0], [0], "stop"), info={"completion_id": "chatcmpl-x"})]
    episode = Episode(None, 0, 0, turns, StopReason.DONE)
    assert list(export_interactions(episode)) == ["chatcmpl-x"]
    assert list(export_interactions(episodes_to_tensordict([episode]))) == ["chatcmpl-x"]


def test_nothing_was_called():
    assert export_interactions(Episode(None)) == {}
    assert export_interactions(session([]), style="concat") == {}


def bad(text, source, **kwargs):
    return refused(text, export_interactions, source, **kwargs)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        bad("style must be one of 'individual', 'concat'", Episode(None), style="tree"),
        bad("discount must lie in [0, 1], got 1.5", Episode(None), discount=1.5),
        bad("a Session, an Episode or the TensorDict …, got list", [], error=TypeError),
        bad("batch size [T], got [2, 2]", TensorDict({}, [2, 2])),
    ],
)
def test_wrong_arguments_are_refused(call, error, text):
    check_refused(call, error, text)
