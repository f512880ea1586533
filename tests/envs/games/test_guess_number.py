"""The guessing game's rules, its optimum against brute force, and its players."""

import functools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import check_refused, refused
from torchrl_mt.envs import GuessNumber, optimal_return, play_guess_number


def bisect(low, high):
    return (low + high) // 2


def brute_force_return(numbers, turns, gamma):
    """Best expected return by dynamic programming over how many numbers are still possible."""

    @functools.cache
    def total(possible, turns):
        if possible == 0 or turns == 0:
            return 0.0
        return max(
            1 + gamma * (total(below, turns - 1) + total(possible - 1 - below, turns - 1))
            for below in range(possible)
        )

    return total(numbers, turns) / numbers


def hint(step):
    (message,) = step.messages
    assert message["role"] == "user"
    return message["content"]


@given(st.integers(1, 30), st.integers(1, 2), st.data())
def test_hints_point_at_the_number_whatever_the_seed(numbers, turns, data):
    number = data.draw(st.integers(1, numbers))
    guess = data.draw(st.integers(1, numbers))
    env = GuessNumber(numbers, turns)
    env.reset({"number": number, "seed": 5})
    step = env.step(f" {guess}\n")
    expected = "correct" if guess == number else "higher" if number > guess else "lower"
    assert hint(step) == expected
    assert step.reward == float(guess == number)
    assert step.terminated == (guess == number or turns == 1)
    assert step.info == ({"found": guess == number, "guesses": 1} if step.done else None)


@pytest.mark.parametrize(
    "response", ["", "0", "17", "-3", "7.", "seven", "7 8", "1_0", "+7", "٧", "9" * 6000]
)
def test_what_is_no_number_in_range_is_invalid_and_costs_the_turn(response):
    env = GuessNumber(16, turns=2)
    env.reset({"number": 7})
    step = env.step(response)
    assert (hint(step), step.reward, step.done) == ("invalid", 0.0, False)
    step = env.step(response)
    assert (hint(step), step.terminated) == ("invalid", True)
    assert step.info == {"found": False, "guesses": 2}


@given(st.integers(1, 6), st.integers(1, 6))
def test_the_episode_terminates_when_guesses_are_spent(turns, number):
    env = GuessNumber(7, turns)
    env.reset({"number": number})
    for turn in range(1, turns + 1):
        step = env.step("7")
        assert step.done == (turn == turns)
    assert step.terminated
    assert step.reward == 0.0
    assert hint(step) == "lower"
    with pytest.raises(RuntimeError, match="reset"):
        env.step("1")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        *(refused(f"1..16, got {n}", GuessNumber(16).reset, {"number": n}) for n in (0, 17, -1)),
        refused("numbers must be at least 1, got 0", GuessNumber, numbers=0),
        refused("turns must be at least 1, got 0", GuessNumber, turns=0),
        *(refused("gamma", optimal_return, 16, 5, gamma) for gamma in (-0.1, 1.1, float("nan"))),
    ],
)
def test_numbers_out_of_range_are_refused(call, error, text):
    check_refused(call, error, text)


def test_the_game_may_begin_with_a_dialogue():
    contents = ["numbers are 1 to {numbers}", "go", "{numbers}", "again, {{1}} to {numbers}"]
    roles = ["system", "user", "assistant", "user"]
    opening = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    env = GuessNumber(9, prompt=opening)
    for message in env.reset():
        message["content"] += "!"  # A collector may do so.
    expected = ["numbers are 1 to 9", "go", "9", "again, {1} to 9"]
    assert [m["content"] for m in env.reset()] == expected
    assert [m["role"] for m in env.reset()] == roles
    assert opening[2]["content"] == "{numbers}"


@pytest.mark.parametrize(
    "prompt",
    [None, 3, [], ["guess"], {"role": "user", "content": "guess"}, [{"content": "guess"}]]
    + [[{"role": "user", "content": content}] for content in (None, ["guess"])],
)
def test_a_prompt_that_is_no_dialogue_is_refused(prompt):
    with pytest.raises(TypeError, match=r"^prompt must be text or a list of messages .* got .*\.$"):
        GuessNumber(prompt=prompt)


@pytest.mark.parametrize("text", ["{number}", "{", "{}", "{numbers.most}"])
def test_a_prompt_with_other_braces_is_refused(text):
    for prompt in (text, [{"role": "user", "content": text}]):
        with pytest.raises(ValueError, match=r"^prompt must have no braces but \{numbers\}.*\.$"):
            GuessNumber(prompt=prompt)


def test_data_covers_the_range():
    items = GuessNumber.data(400, numbers=5, seed=3)
    assert {item["number"] for item in items} == set(range(1, 6))


@given(st.integers(1, 24), st.integers(1, 8), st.floats(0, 1))
def test_the_optimum_is_that_of_brute_force(numbers, turns, gamma):
    expected = brute_force_return(numbers, turns, gamma)
    assert optimal_return(numbers, turns, gamma) == pytest.approx(expected, abs=1e-9)


@given(st.integers(1, 40), st.integers(1, 8), st.floats(0, 1))
def test_bisection_reaches_the_optimum(numbers, turns, gamma):
    games = (
        play_guess_number(bisect, n, numbers=numbers, turns=turns) for n in range(1, numbers + 1)
    )
    returns = [sum(r * gamma**k for k, r in enumerate(game.rewards)) for game in games]
    assert sum(returns) / numbers == pytest.approx(optimal_return(numbers, turns, gamma), abs=1e-9)


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 1000), st.data())
def test_a_random_player_keeps_to_the_hints(numbers, turns, seed, data):
    number = data.draw(st.integers(1, numbers))
    game, again = (
        play_guess_number(random.Random(seed).randint, number, numbers=numbers, turns=turns)
        for _ in range(2)
    )
    assert game == again
    roles = ["user"] + ["assistant", "user"] * len(game.rewards)
    assert [m["role"] for m in game.messages] == roles
    possible = set(range(1, numbers + 1))
    for guess, answer in pairs(game):
        assert guess in possible
        possible = {
            "higher": {n for n in possible if n > guess},
            "lower": {n for n in possible if n < guess},
            "correct": {guess},
        }[answer]
        assert number in possible
    assert len(game.rewards) == turns or game.rewards[-1] == 1.0


def pairs(game):
    contents = [m["content"] for m in game.messages[1:]]
    return [(int(g), a) for g, a in zip(contents[::2], contents[1::2], strict=True)]


def test_a_random_players_first_guess_is_uniform():
    rng = random.Random(0)
    counts = dict.fromkeys(range(1, 5), 0)
    for _ in range(2000):
        counts[pairs(play_guess_number(rng.randint, 2, numbers=4))[0][0]] += 1
    assert all(400 < count < 600 for count in counts.values())


def test_a_player_that_ignores_the_hints_is_refused():
    with pytest.raises(ValueError, match=r"9\.\.16, got 8"):
        play_guess_number(lambda low, high: 8, number=12)
