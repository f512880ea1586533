"""What an episode may be: arrays, lists, dicts and TensorDicts, and what is refused of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from torchrl_mt.data import EpisodeStorage
from torchrl_mt.datasets import EpisodeDataset, episode_writer, open_episodes, save_episodes

from .episodes import assert_same


def stored(episode):
    """The episode as a storage has it."""
    storage = EpisodeStorage(20)
    episode_writer(storage).write_episode(episode)
    return storage.episode(0)


def test_arrays_lists_and_tensordicts_are_the_same(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (3, 4, 4, 3), dtype=np.uint8)
    tensors = TensorDict({"image": torch.from_numpy(image), "next": {"reward": torch.ones(3)}}, [3])
    forms = [
        {"image": image, ("next", "reward"): np.ones(3, np.float32)},
        {"image": list(image), "next": {"reward": [1.0, 1.0, 1.0]}},
        tensors,
        lazy_stack(list(tensors.unbind(0))),
    ]
    save_episodes(forms, tmp_path / "a.jsonl")
    for each in EpisodeDataset(tmp_path / "a.jsonl").episodes():
        assert torch.equal(each["image"], torch.from_numpy(image))
        assert torch.equal(each["next", "reward"], torch.ones(3))


def test_lists_of_lists_may_differ_in_length(tmp_path):
    with open_episodes(tmp_path / "a.jsonl") as out:
        out.write_episode({"tokens": [[1, 2], [3, 4]], "text": ["a", "b"]})
        out.write_episode({"tokens": [[1], [], [2, 3]], "text": ["", "c", "d"]})
        with pytest.raises(ValueError, match=r"'tokens' must be as in .* got .*float32"):
            out.write_episode({"tokens": [[0.5]], "text": ["a"]})
    dataset = EpisodeDataset(tmp_path / "a.jsonl")
    assert dataset.episode(0)["tokens"].tolist() == [[1, 2], [3, 4]]
    rows = dataset.episode(1).get("tokens", as_list=True)
    assert [row.tolist() for row in rows] == [[1], [], [2, 3]]
    assert {row.dtype for row in rows} == {torch.int64}


# ---- lists of dicts -----------------------------------------------------------------------------


def test_dict_observations_become_nested_entries():
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 4), dtype=np.uint8)
    steps = [
        {"image": image, "robot": {"x": i, "v": np.float32(i / 2)}}
        for i, image in enumerate(pixels)
    ]
    tensordicts = [TensorDict({**step, "robot": TensorDict(step["robot"])}) for step in steps]
    for each in (steps, tensordicts):
        found = stored({"observation": each})
        assert torch.equal(found["observation", "image"], torch.from_numpy(pixels))
        assert found["observation", "robot", "x"].tolist() == [0, 1, 2]
        assert found["observation", "robot", "v"].dtype == torch.float32


@pytest.mark.parametrize(
    "steps",
    [
        [{"a": 1}, {"b": 2}],
        [{"a": 1}, {}],
        [{"a": 1}, {"a": None}],
        [{"a": 1}, {"a": np.zeros(2)}],
        [{"role": "user", "number": 1}] * 2,
        [{}, {}],
        [{1: 2}, {1: 3}],
        [{"a": 1}, None],
    ],
)
def test_other_dicts_stay_objects(steps):
    assert repr(list(stored({"info": steps})["info"])) == repr(steps)


def test_dicts_stay_what_they_were_in_the_first_episode(tmp_path):
    numbers, others = {"info": [{"x": 1}]}, {"info": [{"x": 1}, {}]}
    storage = EpisodeStorage(10)
    for out in (open_episodes(tmp_path / "a.jsonl"), episode_writer(storage)):
        with out:
            out.write_episodes([others, numbers])
    for source in (storage, EpisodeDataset(tmp_path / "a.jsonl")):
        assert source.episode(1)["info"] == [{"x": 1}]
    said = r"\('info', 'x'\) is missing. The dicts of its steps must"
    with pytest.raises(ValueError, match=said):
        save_episodes([numbers, others], tmp_path / "b.jsonl")


# ---- what would be lost -------------------------------------------------------------------------


def palette_image():
    image = pytest.importorskip("PIL.Image")
    return image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).convert("P")


MORE_THAN_NUMBERS = {
    "filled": lambda: np.ma.masked_array([1.0, 2.0], mask=[False, True]),
    "each as an entry": lambda: np.zeros(2, dtype=[("x", "i4"), ("y", "f4")]),
    'astype\\("int64"\\)': lambda: np.array(["2020-01-01", "2020-01-02"], dtype="M8[ns]"),
    "timedelta64": lambda: np.array([1, 2], dtype="m8[s]"),
    'convert\\("RGB"\\)': palette_image,
}


@pytest.mark.parametrize("advice", MORE_THAN_NUMBERS)
def test_what_is_more_than_its_numbers_is_refused(advice, tmp_path):
    value = MORE_THAN_NUMBERS[advice]()
    forms = [[value, value], [value, None]]
    if isinstance(value, np.ndarray):
        forms += [value, [{"b": value[1]}] * 2, list(value)]
    with open_episodes(tmp_path / "a.jsonl") as out:
        for form in forms:
            with pytest.raises(TypeError, match=f"'a'.*{advice}"):
                out.write_episode({"a": form})
        if isinstance(value, np.ndarray):
            with pytest.raises(TypeError, match=f"metadata: .*{advice}"):
                out.write_episode({"a": [1]}, metadata={"when": value})
            with pytest.raises(TypeError, match=f"metadata: .*{advice}"):
                out.write_episode({"a": [1]}, metadata={"when": [{"deep": value[1]}]})
    assert not (tmp_path / "a.jsonl").exists()


# ---- what an error says to do -------------------------------------------------------------------

FLOATS = r"'reward'\).*give float\(value\) from the first episode on"
KEYS = "keys must be strings or tuples of strings, got"


@pytest.mark.parametrize(
    ("episodes", "error", "message"),
    [
        *(
            ([{"a": numbers}], ValueError, "'a' has integers beyond int64: give floats")
            for numbers in ([1, 2**63], [np.int64(1), -(2**63) - 1])
        ),
        *(([{"a": [1], "deep": {key: [1]}}], TypeError, KEYS) for key in (1, ("a", 1), (), None)),
        *(
            ([odd], ValueError, "a key must be given once")
            for odd in ({("a", "b"): [1], "a": [2]}, {"a": {"b": [1]}, ("a", "b"): [2]})
        ),
        *(
            ([{"next": {"reward": each}} for each in rewards], ValueError, FLOATS)
            for rewards in (([1.0], [1]), ([1], [1.0]), ([[1], [2, 3]], [[0.5], []]))
        ),
        (
            [{"pixels": [np.zeros((2, 2)), np.zeros((n, 2))]} for n in (2, 3)],
            ValueError,
            "give it as a lazy stack .* from the first episode on",
        ),
        (
            [{"observation": [1, 2, 3], "action": [0, 0], "reward": [0.0, 1.0]}],
            ValueError,
            r"Of the 3 rows of 'observation', give the first 2 as 'observation' and the last 2 as "
            r"\('next', 'observation'\)\.",
        ),
        (
            [{"a": [0, 1], "done": [True, True]}],
            ValueError,
            r"\('next', 'done'\) is true at step 0",
        ),
    ],
)
def test_an_error_says_what_to_give(episodes, error, message, tmp_path):
    with open_episodes(tmp_path / "a.jsonl") as out:
        out.write_episodes(episodes[:-1])
        with pytest.raises(error, match=message):
            out.write_episode(episodes[-1])


def test_a_first_episode_of_empty_lists_is_explained(tmp_path):
    empty, full = {"tokens": [[], []]}, {"tokens": [[1], []]}
    with pytest.raises(ValueError, match=r"empty lists only, give them as arrays, such as"):
        save_episodes([empty, full], tmp_path / "a.jsonl")
    arrays = {"tokens": [np.zeros(0, dtype=int)] * 2}
    for i, first in enumerate((full, arrays)):
        save_episodes([first, empty, full], tmp_path / f"{i}.jsonl")
        storage = EpisodeStorage(10)
        episode_writer(storage).write_episodes([first, empty, full])
        for source in (storage, EpisodeDataset(tmp_path / f"{i}.jsonl")):
            tokens = source.episode(1).get("tokens", as_list=True)
            assert [(each.shape, each.dtype) for each in tokens] == [((0,), torch.int64)] * 2


# ---- TED ----------------------------------------------------------------------------------------


def test_outcomes_at_the_root_go_under_next(tmp_path):
    ends = {"terminated": [False, True], "truncated": [False, False], "done": [False, True]}
    outcomes = {"reward": [0.0, 1.0], **ends}
    flat = {"observation": [0, 1], "next": {"observation": [1, 2]}, **outcomes}
    nested = {"observation": [0, 1], "next": {"observation": [1, 2], **outcomes}}
    save_episodes([flat, nested, TensorDict(flat, [2])], tmp_path / "a.jsonl")
    first, second, third = EpisodeDataset(tmp_path / "a.jsonl").episodes()
    assert_same(first, second)
    assert_same(first, third)


@pytest.mark.parametrize("name", ["reward", "done", "terminated", "truncated"])
def test_outcomes_at_the_root_stay_beside_those_under_next(name):
    for given, keys in [
        ({"done": [False, False], "next": {name: [0, 1]}}, {"done", ("next", name)}),
        ({"reward": [0], "next": {name: {"red": [0]}}}, {"reward", ("next", name, "red")}),
        ({name: [0], "next": [1]}, {name, "next"}),
    ]:
        assert set(stored(given).keys(True, True)) == keys
