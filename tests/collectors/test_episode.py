"""What an episode says of itself agrees with the rows that it is trained on."""

from __future__ import annotations

import sys

import pytest

from torchrl_mt.collectors import Episode, Turn
from torchrl_mt.collectors.prompt import Prompt
from torchrl_mt.engines import Completion


def said(tokens, versions=None) -> Completion:
    return Completion(tokens, [-0.5] * len(tokens), versions or [0] * len(tokens), "stop")


def test_an_episode_without_turns_has_no_forks():
    assert Episode(None).num_forks == 0


def test_an_empty_prompt_can_be_counted():
    episode = Episode(None, turns=[Turn([], said([1])), Turn([], said([]))])
    assert episode.num_forks == 1


def test_forks_of_a_long_dialogue_are_counted_in_steps_linear_in_its_length():
    def calls(turns):
        line, episode = [1, 2], Episode(None)
        for _ in range(turns):
            answer = [3] * 60
            episode.turns.append(Turn(Prompt(line, len(line)), said(answer)))
            line += [*answer, 4]
        count = 0

        def counted(*_):
            nonlocal count
            count += 1

        sys.setprofile(counted)
        try:
            assert episode.num_forks == 0
        finally:
            sys.setprofile(None)
        return count

    assert calls(256) <= 2.2 * calls(128)


@pytest.mark.parametrize(
    ("versions", "age"), [([], None), ([[]], None), ([[], [4, 3]], 2), ([[3, 3], [5]], 2)]
)
def test_the_age_is_that_of_the_oldest_token(versions, age):
    turns = [Turn([1], said([7] * len(v), v)) for v in versions]
    assert Episode(None, turns=turns).age(5) == age
