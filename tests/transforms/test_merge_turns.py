"""The ledger: rows hold, token for token, what the engine was given and what it returned."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer

from tests.buffers import buffer_of
from tests.data.conversations import listed
from torchrl_mt.data import EpisodeSampler
from torchrl_mt.objectives.functional import turn_returns
from torchrl_mt.transforms import MergeTurns

PAD = 9


@dataclass
class Turn:
    prompt: list[int]
    response: list[int]
    reward: float = 0.0
    version: int = 0


@dataclass
class Row:
    """A row as the reference builds it: one list entry a token."""

    episode: int
    fork: int
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    source: list[tuple[int, int] | None] = field(default_factory=list)
    """(turn, position in its response) of each sampled token."""


def reference_parents(episode: list[Turn]) -> list[int]:
    """The longest turn before each whose tokens its prompt begins with, -1 for none."""
    tokens = [turn.prompt + turn.response for turn in episode]
    parents = []
    for k, turn in enumerate(episode):
        fitting = [j for j in range(k) if turn.prompt[: len(tokens[j])] == tokens[j]]
        parents.append(max(fitting, key=lambda j: (len(tokens[j]), j), default=-1))
    return parents


def reference_rows(episodes: list[list[Turn]]) -> list[Row]:
    """The ledger rule, one token at a time."""
    out = []
    for e, episode in enumerate(episodes):
        rows: list[Row] = []
        ending: dict[int, Row] = {}  # the row that ends with a turn
        for k, (turn, parent) in enumerate(zip(episode, reference_parents(episode), strict=True)):
            row = ending.pop(parent, None)
            if row is None:
                row = Row(e, len(rows))
                rows.append(row)
            ending[k] = row
            for token in turn.prompt[len(row.tokens) :]:
                row.tokens.append(token)
                row.sampled.append(False)
                row.turns.append(k)
                row.source.append(None)
            for i, token in enumerate(turn.response):
                row.tokens.append(token)
                row.sampled.append(True)
                row.turns.append(k)
                row.source.append((k, i))
        out += rows
    return out


def log_probs(e: int, k: int, n: int) -> torch.Tensor:
    """A different log-probability for every token of the batch."""
    return -(1.0 + 1000 * e + 50 * k + torch.arange(n, dtype=torch.float32))


def versions(turn: Turn) -> torch.Tensor:
    """New weights halfway through every response."""
    n = len(turn.response)
    return turn.version + (torch.arange(n) >= n // 2)


def to_ted(episodes, layout="root", ids=None, done=True, groups=None, returns=False, parents=None):
    """The flat TED batch of the episodes; ``parents`` gives those of an episode."""
    steps = []
    for e, episode in enumerate(episodes):
        of_turns = parents(episode) if parents else []
        for k, turn in enumerate(episode):
            n = len(turn.response)
            last = torch.tensor([k == len(episode) - 1])
            step = {
                ("tokens", "prompt"): torch.tensor(turn.prompt, dtype=torch.int64),
                ("tokens", "response"): torch.tensor(turn.response, dtype=torch.int64),
                ("log_probs", "response"): log_probs(e, k, n),
                ("versions", "response"): versions(turn),
                ("next", "reward"): torch.tensor([turn.reward]),
                ("collector", "traj_ids"): torch.tensor(e if ids is None else ids[e]),
                "text": f"{e}/{k}",
            }
            if parents:
                step["turn", "parent"] = torch.tensor(of_turns[k])
            if done:
                step["next", "done"] = last
            if groups is not None:
                step["group"] = torch.tensor(groups[e])
            if returns:
                step["next", "return"] = torch.tensor([100.0 * e + k])
            steps.append(TensorDict(step, []))
    root = lazy_stack(steps)
    if layout == "root":
        return root
    dense = root.exclude("tokens", "log_probs", "versions").contiguous()
    for key in ("tokens", "log_probs", "versions"):
        node = root.get(key)
        dense.set(key, node.contiguous() if layout == "dense" else node)
    return dense


def row_values(rows, n):
    """Row ``n`` without its padding, as the reference sees it."""
    length = int(rows["masks", "all_attention_mask"][n].sum())
    return {key: rows[key][n, :length].tolist() for key in (("tokens", "full"), ("turns", "full"))}


small_tokens = st.lists(st.integers(1, 3), max_size=4)


@st.composite
def random_episode(draw):
    """Turns that go on with any earlier history: whole, cut, rewritten, or none."""
    turns: list[Turn] = []
    for k in range(draw(st.integers(1, 6))):
        history = []
        if turns and draw(st.integers(0, 9)) < 8:
            before = turns[draw(st.integers(0, k - 1))]
            history = before.prompt + before.response
            how = draw(st.sampled_from(["whole", "whole", "cut", "drop", "rewrite"]))
            at = draw(st.integers(0, len(history)))
            if how == "cut":
                history = history[:at]
            elif how == "drop":
                history = history[at:]
            elif how == "rewrite" and history:
                at = min(at, len(history) - 1)
                history = [*history[:at], 4, *history[at + 1 :]]
        prompt, response = history + draw(small_tokens), draw(small_tokens)
        if not prompt:
            prompt = [1]
        reward = draw(st.integers(-8, 8)) / 4
        turns.append(Turn(prompt, response, reward, draw(st.integers(0, 5))))
    return turns


batches = st.lists(random_episode(), min_size=1, max_size=4)


@given(batches, st.sampled_from(["root", "nested"]))
def test_rows_are_the_ledger(episodes, layout):
    data = to_ted(episodes, layout)
    keys = set(data.keys(True, True))
    rows = MergeTurns(pad_token_id=PAD)(data)
    assert set(data.keys(True, True)) == keys
    expected = reference_rows(episodes)
    length = max(len(row.tokens) for row in expected)
    assert rows.batch_size == torch.Size([len(expected)])
    for key, dtype, pad in (
        (("tokens", "full"), torch.int64, PAD),
        (("masks", "all_attention_mask"), torch.bool, False),
        (("masks", "all_assistant_mask"), torch.bool, False),
        (("log_probs", "full"), torch.float32, 0),
        (("versions", "full"), torch.int64, -1),
        (("turns", "full"), torch.int64, -1),
        (("rewards", "full"), torch.float32, 0),
    ):
        value = rows[key]
        assert (value.dtype, value.shape) == (dtype, (len(expected), length)), key
        for n, row in enumerate(expected):
            assert (value[n, len(row.tokens) :] == pad).all(), key
    for n, row in enumerate(expected):
        size, episode = len(row.tokens), episodes[row.episode]
        assert rows["tokens", "full"][n, :size].tolist() == row.tokens
        assert rows["masks", "all_attention_mask"][n, :size].all()
        assert rows["masks", "all_assistant_mask"][n, :size].tolist() == row.sampled
        assert rows["turns", "full"][n, :size].tolist() == row.turns
        assert (rows["episode"][n], rows["fork"][n]) == (row.episode, row.fork)
        sampled_by = []
        for column, source in enumerate(row.source):
            log_prob, version = 0.0, -1
            if source is not None:
                turn, i = source
                log_prob = log_probs(row.episode, turn, i + 1)[i]
                version = int(versions(episode[turn])[i])
                sampled_by.append(version)
            assert rows["log_probs", "full"][n, column] == log_prob
            assert rows["versions", "full"][n, column] == version
        assert rows["versions", "oldest"][n] == min(sampled_by, default=-1)
        assert rows["versions", "newest"][n] == max(sampled_by, default=-1)


def check_rows_read_back(rows, episodes):
    """Every response is in one row, behind the prompt that the engine was given, and nothing else is."""
    sampled, turns = rows["masks", "all_assistant_mask"], rows["turns", "full"]
    for e, episode in enumerate(episodes):
        for k, turn in enumerate(episode):
            if not turn.response:
                continue
            where = ((rows["episode_index"] == e)[:, None] & sampled & (turns == k)).nonzero()
            (n,) = set(where[:, 0].tolist())
            first, last = where[0, 1], where[-1, 1]
            assert rows["tokens", "full"][n, :first].tolist() == turn.prompt
            assert rows["tokens", "full"][n, first : last + 1].tolist() == turn.response
    assert sampled.sum() == sum(len(turn.response) for episode in episodes for turn in episode)


def same(a, b):
    """Whether rows are equal, entry by entry."""
    keys = set(a.keys(True, True))
    return keys == set(b.keys(True, True)) and all(torch.equal(a[key], b[key]) for key in keys)


@given(batches, st.sampled_from(["root", "nested"]))
def test_parents_in_the_batch_make_the_rows_that_comparing_makes(episodes, layout):
    told = to_ted(episodes, layout, parents=reference_parents)
    rows = MergeTurns()(told)
    check_rows_read_back(rows, episodes)
    assert same(rows, MergeTurns()(to_ted(episodes, layout)))
    for start in range(len(episodes[0])):  # a piece of an episode, the first turns missing
        piece = MergeTurns()(to_ted(episodes, layout)[start:])
        assert same(MergeTurns()(told[start:]), piece)


@given(batches, st.data())
def test_wrong_parents_make_other_rows_and_no_wrong_ones(episodes, data):
    def parents(episode):
        return data.draw(st.lists(st.integers(-2, 6), min_size=len(episode), max_size=len(episode)))

    check_rows_read_back(MergeTurns()(to_ted(episodes, parents=parents)), episodes)


def test_a_parent_that_no_longer_holds_is_not_believed():
    """A transform changed the first answer after the turns were recorded."""
    data = to_ted([[Turn([1, 2], [3]), Turn([1, 2, 3, 4], [5])]], parents=reference_parents)
    data[0]["tokens", "response"] = torch.tensor([8])
    rows = MergeTurns(pad_token_id=PAD)(data)
    assert rows["tokens", "full"].tolist() == [[1, 2, 8, PAD, PAD], [1, 2, 3, 4, 5]]


@given(batches)
def test_rewards_lie_on_the_turns_last_sampled_token(episodes):
    rows = MergeTurns()(to_ted(episodes, returns=True))
    expected = torch.zeros_like(rows["rewards", "full"])
    returns = torch.zeros_like(expected)
    sampled, turns = rows["masks", "all_assistant_mask"], rows["turns", "full"]
    for e, episode in enumerate(episodes):
        mine = sampled & (rows["episode_index"] == e)[:, None]
        # In the order in which they were sampled; the tokens of one turn lie in one row.
        where = sorted(((int(turns[n, c]), n, c) for n, c in mine.nonzero().tolist()))
        for k, turn in enumerate(episode):
            upto = [(n, c) for t, n, c in where if t <= k]
            if where:
                _, *first = where[0]
                n, c = upto[-1] if upto else first
                expected[n, c] += turn.reward
        for k, n, c in where:
            returns[n, c] = 100.0 * e + k
        if not where:
            alone = (rows["episode_index"] == e).nonzero().flatten()
            total = rows["rewards", "full"][alone].sum()
            assert total == sum(turn.reward for turn in episode)
            expected[alone] = rows["rewards", "full"][alone]
    torch.testing.assert_close(rows["rewards", "full"], expected, rtol=0, atol=0)
    torch.testing.assert_close(rows["rewards", "to_go"], returns, rtol=0, atol=0)
    assert rows["rewards", "to_go"].dtype == torch.float32


def test_rewards_of_an_episode_without_sampled_tokens_stay_with_their_turns():
    rows = MergeTurns()(to_ted([[Turn([1, 2], [], 1.0), Turn([1, 2, 3], [], 2.0)]]))
    assert rows["rewards", "full"].tolist() == [[0, 1.0, 2.0]]


@given(batches, st.sampled_from([0.5, 1.0]))
def test_the_returns_of_rows_are_those_of_the_plain_recurrence(episodes, gamma):
    """Exactly so without a discount, and with one where every turn sampled a token."""
    rows = MergeTurns()(to_ted(episodes))
    mask, turns = rows["masks", "all_assistant_mask"], rows["turns", "full"]
    got = turn_returns(rows["rewards", "full"], mask, turns, gamma, episode=rows["episode_index"])
    for n, c in mask.nonzero().tolist():
        episode, k = episodes[rows["episode_index"][n]], int(turns[n, c])
        if gamma < 1.0 and not all(turn.response for turn in episode):
            continue
        expected = sum(gamma ** (u - k) * episode[u].reward for u in range(k, len(episode)))
        if not any(turn.response for turn in episode[:k]):
            expected += sum(turn.reward for turn in episode[:k])
        assert got[n, c] == pytest.approx(expected, abs=1e-5)


TWO_TURNS = [Turn([1], [2]), Turn([1, 2, 3], [4])]


def test_the_same_episode_twice_in_succession_is_two_rows():
    rows = MergeTurns()(to_ted([TWO_TURNS, TWO_TURNS], ids=[7, 7]))
    assert rows["episode"].tolist() == [7, 7]
    assert rows["episode_index"].tolist() == [0, 1]
    assert rows["fork"].tolist() == [0, 0]


def test_flags_alone_tell_episodes_apart():
    data = to_ted([TWO_TURNS, TWO_TURNS], "nested").exclude("collector")
    rows = MergeTurns()(data)
    assert rows["episode"].tolist() == [0, 1]
    assert rows["group"].tolist() == [0, 1]


def test_groups_are_carried_and_default_to_the_episode_which_ids_alone_may_tell():
    for done in (True, False):
        data = to_ted([TWO_TURNS, TWO_TURNS], ids=[7, 3], groups=[5, 5], done=done)
        assert MergeTurns()(data)["group"].tolist() == [5, 5]
        rows = MergeTurns()(data.exclude("group"))
        assert rows["group"].tolist() == rows["episode"].tolist() == [7, 3]


def test_dense_leaves():
    episodes = [[Turn([1, 1], [2])], [Turn([3, 3], [4])]]
    rows = MergeTurns()(to_ted(episodes, "dense"))
    assert rows["tokens", "full"].tolist() == [[1, 1, 2], [3, 3, 4]]


def test_what_the_data_lacks_the_rows_lack():
    data = to_ted([TWO_TURNS], "nested").exclude("log_probs", "versions", ("next", "reward"))
    rows = MergeTurns()(data)
    kept = "tokens", "masks", "turns", "episode", "episode_index", "fork", "group"
    assert set(rows.keys()) == set(kept)


def test_in_a_replay_buffer_writes_pass_and_samples_are_rows():
    data = to_ted([TWO_TURNS, [Turn([5], [6])]], groups=[1, 2])
    buffer = ReplayBuffer(
        storage=LazyStackStorage(10), transform=MergeTurns(), collate_fn=lambda x: x
    )
    buffer.extend(data)
    stored = buffer.storage[:]
    assert isinstance(stored, LazyStackedTensorDict)
    for key in (("tokens", "prompt"), ("tokens", "response")):
        assert listed(stored, key) == listed(data, key)
    rows = buffer[:]
    assert rows["tokens", "full"].tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert rows["group"].tolist() == [1, 2]


def test_episodes_that_do_not_end_are_refused():
    data = to_ted([TWO_TURNS, TWO_TURNS], "nested")
    for cut, turn in (([0, 2, 3], 0), ([0, 1, 2], 2), ([0], 0), ([2, 0, 1], 0)):
        with pytest.raises(ValueError, match=rf"turn {turn}, .*not done.*EpisodeSampler"):
            MergeTurns()(data[torch.tensor(cut)])


@pytest.mark.parametrize(
    "flags",
    [
        ("done",),
        ("terminated",),
        ("truncated",),
        ("done", "truncated"),
        ("terminated", "truncated"),
    ],
)
def test_every_set_of_flags_that_says_where_episodes_end_is_asked(flags):
    data = to_ted([TWO_TURNS, TWO_TURNS], "nested", ids=[7, 7])
    ends = data["next", "done"]
    data = data.exclude(("next", "done"))
    for k, flag in enumerate(flags):
        data["next", flag] = ends & (torch.arange(4) // 2 == k)[:, None] if flags[1:] else ends
    assert MergeTurns()(data)["episode_index"].tolist() == [0, 1]
    if flags[1:] or flags == ("done",):
        with pytest.raises(ValueError, match="EpisodeSampler"):
            MergeTurns()(data[:3])


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_one_of_two_flags_does_not_say_where_episodes_end_by_the_other(flag):
    data = to_ted([TWO_TURNS, TWO_TURNS], "nested", ids=[7, 3])
    data.rename_key_(("next", "done"), ("next", flag))
    data["next", flag][:] = False
    assert MergeTurns()(data)["episode"].tolist() == [7, 3]


def replay(data, **kwargs):
    """A buffer of whole episodes that makes rows of what it samples."""
    buffer = buffer_of(100, transform=MergeTurns(), seed=0, **kwargs)
    buffer.extend(data)
    return buffer


def test_whole_episodes_of_a_buffer_pass_whatever_their_order():
    data = to_ted([TWO_TURNS, [Turn([5], [6])], TWO_TURNS], ids=[4, 2, 9])
    buffer = replay(data, sampler=EpisodeSampler(), batch_size=16)
    rows = buffer.sample()
    assert len(rows) == 16
    assert rows["episode_index"].tolist() == list(range(16))
    cut = to_ted([TWO_TURNS], ids=[11], layout="nested")
    cut["next", "truncated"] = cut["next", "done"]
    buffer = replay(cut[:1], sampler=EpisodeSampler(replacement=False), batch_size=1)
    assert len(buffer) == 0
    buffer.writer.flush()
    assert buffer.sample()["episode"].tolist() == [11]


def sampled_at(data, *temperatures):
    """The batch with the temperature of each turn."""
    data["sampling"] = TensorDict({"temperature": torch.tensor(temperatures)}, data.batch_size)
    return data


def test_turns_that_sampled_nothing_have_no_say_in_the_temperature():
    turns = [Turn([1], [2]), Turn([1, 2, 3], []), Turn([9], []), Turn([9, 8], [])]
    rows = MergeTurns()(sampled_at(to_ted([turns, [Turn([7], [])]]), 0.5, 1.0, 1.0, 2.0, 0.3))
    torch.testing.assert_close(
        rows["sampling", "temperature"], torch.tensor([0.5, torch.nan, 0.3]), equal_nan=True
    )


@given(batches, st.lists(st.sampled_from([0.5, 1.0]), min_size=24, max_size=24))
def test_no_token_was_sampled_at_another_temperature_than_its_row_says(episodes, temperatures):
    turns = [(e, k) for e, episode in enumerate(episodes) for k in range(len(episode))]
    at = dict(zip(turns, temperatures[: len(turns)], strict=True))
    rows = MergeTurns()(sampled_at(to_ted(episodes), *at.values()))
    mask, turn = rows["masks", "all_assistant_mask"], rows["turns", "full"]
    assert rows["sampling", "temperature"].dtype == torch.float32
    for n, temperature in enumerate(rows["sampling", "temperature"].tolist()):
        seen = {at[int(rows["episode_index"][n]), k] for k in turn[n, mask[n]].tolist()}
        if len(seen) == 1:
            assert {temperature} == seen
        elif seen:
            assert temperature != temperature


# ---- what is refused ----------------------------------------------------------------------------


def merged(data, **kwargs):
    return lambda: MergeTurns(**kwargs)(data)


def with_response(key, value):
    data = to_ted([TWO_TURNS])
    data[1][key, "response"] = value
    return merged(data)


NO_IDS = to_ted([TWO_TURNS], "nested").exclude("collector", ("next", "done"))
UNFLAT = to_ted([[Turn([1], [2])], [Turn([1], [2])]], "dense").reshape(2, 1)
SINGLE = to_ted([TWO_TURNS] * 3 + [[Turn([5], [6])]])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (merged(NO_IDS), KeyError, "traj_ids"),
        (merged(UNFLAT), ValueError, r"\[2, 1\]"),
        (merged(to_ted([TWO_TURNS]).exclude(("tokens", "response"))), KeyError, "response"),
        (merged(to_ted([TWO_TURNS]), max_length=3), ValueError, "4 tokens.*max_length=3"),
        (with_response("log_probs", torch.zeros(3)), ValueError, "'log_probs', 'response'.*1.*3"),
        (with_response("tokens", torch.zeros(1, 2, dtype=torch.int64)), ValueError, "1-D"),
        (with_response("tokens", torch.zeros(2)), ValueError, "integer"),
        *(
            (
                merged(to_ted([[Turn([1], [2]), Turn([], said)]])),
                ValueError,
                "turn 1 .* empty prompt",
            )
            for said in ([], [3])
        ),
        (lambda: replay(SINGLE, batch_size=16).sample(), ValueError, r"sampler=EpisodeSampler\(\)"),
        (lambda: MergeTurns()._step(TensorDict(), TensorDict()), RuntimeError, "whole episodes"),
        (lambda: MergeTurns(pad_token_id=0.5), ValueError, "pad_token_id"),
        (lambda: MergeTurns(max_length=0), ValueError, "max_length"),
    ],
)
def test_wrong_calls_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_max_length_is_no_cut():
    assert MergeTurns(max_length=4)(to_ted([TWO_TURNS]))["tokens", "full"].shape == (1, 4)
