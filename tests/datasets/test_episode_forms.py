"""What an episode may be: arrays, lists, dicts and TensorDicts, and what is refused of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from torchrl_mt.data import EpisodeStorage
from torchrl_mt.datasets import EpisodeDataset, episode_writer, open_episodes, save_episodes
from torchrl_mt.datasets._encoding.episode_steps import steps_of
from torchrl_mt.datasets._encoding.values import to_json_text

from .episodes import assert_same


def test_arrays_lists_and_tensordicts_are_the_same(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (3, 4, 4, 3), dtype=np.uint8)
    forms = {
        "arrays": {"image": image, ("next", "reward"): np.ones(3, np.float32)},
        "lists": {"image": list(image), "next": {"reward": [1.0, 1.0, 1.0]}},
        "tensordict": TensorDict(
            {"image": torch.from_numpy(image), "next": {"reward": torch.ones(3)}}, [3]
        ),
        "lazy stack": lazy_stack(
            [
                TensorDict({"image": torch.from_numpy(each), "next": {"reward": torch.tensor(1.0)}})
                for each in image
            ]
        ),
    }
    with open_episodes(tmp_path / "a.jsonl") as out:
        for form in forms.values():
            out.write_episode(form)
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


def test_a_shape_that_varies_after_a_fixed_one_is_explained(tmp_path):
    with open_episodes(tmp_path / "a.jsonl") as out:
        out.write_episode({"pixels": [np.zeros((2, 2)), np.zeros((2, 2))]})
        with pytest.raises(
            ValueError, match=r"give it as a lazy stack .* from the first episode on"
        ):
            out.write_episode({"pixels": [np.zeros((2, 2)), np.zeros((3, 2))]})


def test_a_key_is_given_once(tmp_path):
    with open_episodes(tmp_path / "a.jsonl") as out:
        for odd in ({("a", "b"): [1], "a": [2]}, {"a": {"b": [1]}, ("a", "b"): [2]}):
            with pytest.raises(ValueError, match="a key must be given once"):
                out.write_episode(odd)


# ---- lists of dicts -----------------------------------------------------------------------------


def test_dict_observations_become_nested_entries(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 4), dtype=np.uint8)
    steps = [
        {"image": image, "robot": {"x": i, "v": np.float32(i / 2)}}
        for i, image in enumerate(pixels)
    ]
    tensordicts = [TensorDict({**step, "robot": TensorDict(step["robot"])}) for step in steps]
    for each in (steps, tensordicts):
        columns = steps_of({"observation": each}).columns
        assert torch.equal(columns["observation", "image"], torch.from_numpy(pixels))
        assert columns["observation", "robot", "x"].tolist() == [0, 1, 2]
        assert columns["observation", "robot", "v"].dtype == torch.float32


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
def test_other_dicts_stay_objects(steps, tmp_path):
    assert steps_of({"info": steps}).columns["info",].items == steps


def test_dicts_stay_what_they_were_in_the_first_episode(tmp_path):
    numbers, others = {"info": [{"x": 1}]}, {"info": [{"x": 1}, {}]}
    storage = EpisodeStorage(10)
    for out in (open_episodes(tmp_path / "a.jsonl"), episode_writer(storage)):
        with out:
            out.write_episodes([others, numbers])
    for source in (storage, EpisodeDataset(tmp_path / "a.jsonl")):
        assert source.episode(1)["info"] == [{"x": 1}]
    with pytest.raises(
        ValueError, match=r"\('info', 'x'\) is missing. The dicts of its steps must"
    ):
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
            with pytest.raises(TypeError, match=advice):
                to_json_text([{"deep": value[1]}])
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize("numbers", [[1, 2**63], [np.int64(1), -(2**63) - 1]])
def test_integers_beyond_int64_are_refused(numbers):
    with pytest.raises(ValueError, match="'a' has integers beyond int64: give floats"):
        steps_of({"a": numbers})


@pytest.mark.parametrize("key", [1, ("a", 1), (), None])
def test_keys_are_strings(key):
    with pytest.raises(TypeError, match=r"keys must be strings or tuples of strings, got"):
        steps_of({"action": [1], "deep": {key: [1]}})


# ---- what an error says to do -------------------------------------------------------------------


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


@pytest.mark.parametrize("rewards", [([1.0], [1]), ([1], [1.0]), ([[1], [2, 3]], [[0.5], []])])
def test_integers_among_floats_are_explained(rewards, tmp_path):
    episodes = [{"next": {"reward": each}} for each in rewards]
    with pytest.raises(
        ValueError, match=r"'reward'\).*give float\(value\) from the first episode on"
    ):
        save_episodes(episodes, tmp_path / "a.jsonl")


def test_a_last_observation_is_explained():
    steps = {"observation": [1, 2, 3], "action": [0, 0], "reward": [0.0, 1.0]}
    with pytest.raises(
        ValueError,
        match=r"Of the 3 rows of 'observation', give the first 2 as 'observation' and the last 2 as "
        r"\('next', 'observation'\)\.",
    ):
        steps_of(steps)


# ---- TED ----------------------------------------------------------------------------------------


def test_outcomes_at_the_root_go_under_next(tmp_path):
    outcomes = {
        "reward": [0.0, 1.0],
        "terminated": [False, True],
        "truncated": [False, False],
        "done": [False, True],
    }
    flat = {"observation": [0, 1], "next": {"observation": [1, 2]}, **outcomes}
    nested = {"observation": [0, 1], "next": {"observation": [1, 2], **outcomes}}
    save_episodes([flat, nested], tmp_path / "a.jsonl")
    first, second = EpisodeDataset(tmp_path / "a.jsonl").episodes()
    assert_same(first, second)
    with pytest.raises(ValueError, match=r"\('next', 'done'\) is true at step 0"):
        episode_writer(EpisodeStorage(9)).write_episode({"a": [0, 1], "done": [True, True]})


@pytest.mark.parametrize("name", ["reward", "done", "terminated", "truncated"])
def test_outcomes_at_the_root_stay_beside_those_under_next(name):
    steps = steps_of({"done": [False, False], "next": {name: [0, 1]}})
    assert set(steps.columns) == {("done",), ("next", name)}
    per_agent = steps_of({"reward": [0], "next": {name: {"red": [0]}}})
    assert set(per_agent.columns) == {("reward",), ("next", name, "red")}
    assert set(steps_of({name: [0], "next": [1]}).columns) == {(name,), ("next",)}
