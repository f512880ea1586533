"""Games of TextArena: the same as TextArena plays them, and the same for the same seed."""

# ruff: noqa: NPY002 - games draw from the global generators

from __future__ import annotations

import asyncio
import copy
import pickle
import random
import re
import sys
import threading
import zlib
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bridges.collecting import collect
from tests.tiers import examples, in_fast_tier
from torchrl_mt.bridges.textarena import TextArenaEnv
from torchrl_mt.collectors import CollectorOptions, Limits

ta = pytest.importorskip("textarena", reason="textarena is not installed")
nltk = pytest.importorskip("nltk")
registry = pytest.importorskip("textarena.envs.registration").ENV_REGISTRY

WORDS = "apple crane house table chair plant river stone cat dog sun lamp tree bird planet garden"


@pytest.fixture(autouse=True, scope="module")
def word_lists(tmp_path_factory):
    """What games download from NLTK."""
    data = tmp_path_factory.mktemp("nltk_data")
    lists = data / "corpora" / "words"
    lists.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (lists / name).write_text("\n".join(WORDS.split()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NLTK_DATA", str(data))
        patch.setattr(nltk.data, "path", [str(data)])
        patch.setattr(nltk, "download", lambda *args, **kwargs: True)
        dictionary = "textarena.envs.utils.word_lists.EnglishDictionary"
        patch.setattr(f"{dictionary}._load_dic", lambda self, *files: set(WORDS.split()))
        patch.setattr(nltk, "pos_tag", lambda words: [(word, "NN") for word in words])
        yield


def options(text):
    """The moves that an observation mentions."""
    found = re.findall(r"\[[^\[\]\n]{1,20}\]", text)
    return [move for move in found if not move.startswith(("[GAME", "[Player"))] or ["[0]"]


def plays(text):
    """A move that depends on the observation alone."""
    text = str(text)
    number = random.Random(text).randrange(9)
    return random.Random(text).choice([*options(text)[-9:], f"[{number}]"])


async def play(env, data, moves, disturb=lambda: None):
    """The opening and the steps of a game."""
    opening = await env.reset(data)
    steps = []
    for move in moves:
        disturb()
        steps.append(await env.step(move))
        if steps[-1].done:
            break
    return opening, steps


def user(content):
    return [{"role": "user", "content": content}]


# ---- the same as TextArena -----------------------------------------------------------------------

GAMES = {  # with moves that are likely in them
    "GuessTheNumber-v0": [f"[{k}]" for k in range(1, 21)],
    "Mastermind-v0": ["[1 2 3 4]", "[6 5 4 3]", "[1 3 5 2]"],
    "2048-v0-super-easy": ["[up]", "[down]", "[left]", "[right]"],
    "TowerOfHanoi-v0": ["[A B]", "[A C]", "[B C]", "[C B]"],
    "TicTacToe-v0": [f"[{k}]" for k in range(9)],
    "KuhnPoker-v0": ["[check]", "[bet]", "[call]", "[fold]"],
    "IteratedPrisonersDilemma-v0": ["[cooperate]", "[defect]", "good morning"],
}


@pytest.mark.parametrize("name", GAMES)
@examples(few=3)
@given(seed=st.integers(0, 2**31), data=st.data())
def test_a_game_is_that_of_textarena(name, seed, data):
    """TextArena shows a player the whole game each turn; a turn's message is what that adds."""
    move = st.sampled_from([*GAMES[name], "hm", "[nonsense]"])
    moves = data.draw(st.lists(move, min_size=1, max_size=12))
    reference = ta.make(name)
    is_alone = name not in ("TicTacToe-v0", "KuhnPoker-v0", "IteratedPrisonersDilemma-v0")
    reference.reset(num_players=1 if is_alone else 2, seed=seed)
    state = random.getstate()
    seat = 0 if is_alone else data.draw(st.integers(0, 1))
    env = TextArenaEnv(name, opponents=None if is_alone else plays, player_id=seat)

    def up_to_own_turn(move=None):
        """The reward if the game is over, what is new for the player, and its move if it saw that."""
        nonlocal state
        random.setstate(state)
        done, _ = (False, None) if move is None else reference.step(move)
        while not done:
            player, observed = reference.get_observation()
            if player == seat:
                break
            done, _ = reference.step(plays(observed))
        state = random.getstate()
        return reference.close()[0][seat] if done else None, None if done else observed

    async def compare():
        reward, before = up_to_own_turn()
        if reward is not None:  # The opponent has lost already.
            with pytest.raises(RuntimeError, match="over before the first turn"):
                await env.reset({"seed": seed})
            return
        (message,) = await env.reset({"seed": seed})
        assert "\n" + message["content"] == before
        for move in moves:
            reward, whole = up_to_own_turn(move)
            step = await env.step(move)
            assert (step.reward, step.done) == (reward or 0.0, reward is not None)
            if step.done:
                assert step.terminated
                rewards, notes = reference.close()
                told = {"rewards": rewards, "player_id": seat, "seed": seed}
                assert step.info == {**notes[seat], **told}
                return
            own = r"^\n\[(GAME|Player.*)\] " + re.escape(moved(move))
            new = re.sub(own, "", whole[len(before) :])
            assert [m["content"] for m in step.messages] == [new[1:] or "[GAME] Your turn."]
            before = whole

    def moved(move):
        shown = move if "[" in move else f"[{move}]"
        return shown if "ActionFormatting" in str(registry[name].default_wrappers) else move

    asyncio.run(compare())


async def test_invalid_moves_are_those_of_textarena():
    env = TextArenaEnv("GuessTheNumber-v0")
    _, (first, second) = await play(env, {"seed": 3}, ["hm", "[50]"])
    assert first.messages[0]["content"].startswith("[GAME] You attempted an invalid move.")
    assert (first.reward, first.done, first.info) == (0.0, False, None)
    assert (second.reward, second.terminated, second.info["invalid_move"]) == (0.0, True, True)


def test_whole_observations_take_the_place_of_the_dialogue():
    env = TextArenaEnv("TicTacToe-v0-train", opponents=plays, dialogue=False, system_prompt="Win.")
    reference = ta.make("TicTacToe-v0-train")
    reference.reset(num_players=2, seed=1)
    opening, (step,) = asyncio.run(play(env, {"seed": 1}, ["[4]"]))
    system = [{"role": "system", "content": "Win."}]
    assert opening == system + user(reference.get_observation()[1])
    reference.step("[4]")
    reference.step(plays(reference.get_observation()[1]))
    observed = reference.get_observation()[1]
    assert observed.count("Current Board") == 1
    assert (step.history, step.messages) == (system, user(observed))


def test_arguments_reach_the_game():
    env = TextArenaEnv("GuessTheNumber-v0", max_turns=2, max_number=9, system_prompt="Guess.")
    opening = asyncio.run(env.reset({"seed": 3}))
    assert opening[0] == {"role": "system", "content": "Guess."}
    assert "between 1 and 9 within 2 turns" in opening[1]["content"]


# ---- seeds ---------------------------------------------------------------------------------------


class Dice(ta.Env):
    """A game of a module of its own that draws from every global generator, all the time."""

    def __init__(self, say=None, end=None):
        self.constructed = (random.random(), np.random.rand())
        self.say, self.end = say, end

    def reset(self, num_players, seed=None):
        assert num_players < 4, "at most 3 players"
        self.state = ta.FFAMultiPlayerState(num_players, seed=seed)
        self.state.reset(game_state={}, player_prompt_function=lambda **_: self.roll())

    def roll(self):
        drawn = random.random(), np.random.randint(10**9), random.sample(range(99), 3)
        return f"{self.constructed} {drawn}"

    def step(self, action):
        if self.say is None:
            self.state.add_observation(self.roll(), ta.ObservationType.GAME_MESSAGE)
        if action == "end":
            self.state.set_game_outcome(self.end or {k: k / 4 for k in range(3)}, "so")
        return self.state.step()


def register(name, entry_point):
    registry.pop(name, None)
    ta.register(name, entry_point)


register("Dice-v0", Dice)


async def test_games_of_a_seed_are_the_same_whatever_else_draws():
    def disturb():
        random.seed(0)
        np.random.seed(0)

    def others(observation):
        disturb()
        return "go"

    env = TextArenaEnv("Dice-v0", opponents=[others, others], player_id=1)
    alone = await play(copy.deepcopy(env), {"seed": 7}, ["go"] * 3)
    games = (play(copy.deepcopy(env), {"seed": 7 + k % 2}, ["go"] * 3, disturb) for k in range(8))
    at_once = await asyncio.gather(*games)
    assert at_once[::2] == [alone] * 4
    assert at_once[1::2] == [at_once[1]] * 4
    assert at_once[1] != alone
    env = TextArenaEnv("Dice-v0", opponents=[plays, plays], player_id=1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    await play(env, {"seed": 7}, ["go"] * 3)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


def test_outside_of_episodes_the_same_modules_draw_from_the_global_generators():
    TextArenaEnv("Dice-v0")
    game = ta.make("GuessTheNumber-v0")
    numbers = []
    for _ in range(2):
        random.seed(11)
        game.reset(num_players=1)
        numbers.append(game.state.game_state["game_number"])
    assert numbers == [random.Random(11).randint(1, 20)] * 2


async def test_games_without_a_seed_differ_and_say_their_seed():
    env = TextArenaEnv("Dice-v0")
    first, (end,) = await play(env, None, ["end"])
    again, _ = await play(env, {"seed": end.info["seed"]}, ["end"])
    other, _ = await play(env, {}, ["end"])
    assert first == again != other


async def test_data_without_a_seed_determines_the_game():
    env = TextArenaEnv("Dice-v0", opponents=plays, player_id=None)
    first, (end,) = await play(env, {"label": 1}, ["end"])
    assert await play(copy.deepcopy(env), {"label": 1}, ["end"]) == (first, [end])
    assert await env.reset({"label": 2}) != first
    assert await env.reset({"seed": end.info["seed"]}) == first


GLOBALS = """
import textarena as ta
import time

found = None

class Search(ta.Env):
    def reset(self, num_players, seed=None):
        global found
        found = seed
        for _ in range(99):
            time.sleep(0)  # Another thread goes on.
        self.state = ta.SinglePlayerState(num_players, seed=seed)
        self.state.reset(game_state={}, player_prompt_function=lambda **_: f"{found}")

    def step(self, action):
        self.state.set_outcome(0.0, "so")
        return self.state.step()
"""


def test_games_of_a_module_that_writes_its_globals_take_turns(tmp_path, monkeypatch):
    (tmp_path / "game_with_globals.py").write_text(GLOBALS)
    monkeypatch.syspath_prepend(str(tmp_path))
    register("Globals-v0", "game_with_globals:Search")

    async def check():
        env = TextArenaEnv("Globals-v0")
        envs = [TextArenaEnv("Globals-v0"), *(copy.deepcopy(env) for _ in range(7))]
        openings = await asyncio.gather(*(env.reset({"seed": k}) for k, env in enumerate(envs)))
        assert openings == [user(f"[GAME] {k}") for k in range(8)]

    asyncio.run(check())
    del sys.modules["game_with_globals"]


def test_only_games_that_write_globals_take_turns():
    assert isinstance(TextArenaEnv("GuessTheNumber-v0")._template.turns, nullcontext)
    assert not isinstance(TextArenaEnv("Sokoban-v0")._template.turns, nullcontext)


@pytest.mark.parametrize(
    ("name", "reward", "reason"),
    [
        ("ThreeCardMonte-v0", 0.0, "Bad action. Use `[k]`."),
        ("Cryptarithm-v0", 0.125, "Bad action format. Use `[A 5]`."),
        ("Countdown-v0", None, "Invalid action format."),
        ("Slitherlink-v0", 0.0, "Bad action format. Use [h row col] or [v row col]."),
    ],
)
async def test_games_that_swap_the_reason_and_the_reward_mean_a_number(name, reward, reason):
    env = TextArenaEnv(name)
    valid = ["[S 9]"] if name == "Cryptarithm-v0" else []
    _, steps = await play(env, {"seed": 3}, [*valid, "hm"])
    assert f"Reason: {reason}" in steps[-1].messages[0]["content"]
    progress = env._game._calculate_progress() if reward is None else reward
    step = await copy.deepcopy(env).step("hm")
    assert step == await env.step("hm")
    assert step.done
    assert step.info["reason"].startswith(f"Invalid Move: {reason}")
    assert step.info["invalid_move"]
    assert step.reward == progress


# Games that never end: two with a single player, one with so few words, one with players that err.
ENDLESS = ("PublicGoodsGame", "MarketEntryGame", "WordLadder", "Santorini")
OTHERS = {spec.entry_point: name for name, spec in reversed(registry.items())}  # the first of each
OTHERS = sorted(name for name in OTHERS.values() if not name.startswith(ENDLESS))


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
async def test_every_game_is_the_same_for_the_same_seed(name):
    try:
        ta.make(name)
    except Exception as error:
        pytest.skip(f"{name} cannot be made here: {type(error).__name__}: {str(error)[:80]}")

    async def game(number, disturb):
        env = TextArenaEnv(name, opponents=plays if number > 1 else None, num_players=number)
        seen = [await env.reset({"seed": 5})]
        for _ in range(30):
            disturb()
            step = await env.step(plays(seen[-1][-1]["content"] if seen[-1] else ""))
            seen.append(step.messages)
            if step.done:
                return [*seen, step]
        return seen

    for number in range(1, 7):
        try:
            first = await game(number, lambda: None)
        except Exception as error:  # Of the game, such as one that plays() loses at once.
            if "does not begin" in str(error):
                continue
            pytest.skip(f"an error of the game: {error}")
        assert first == await game(number, lambda: random.seed(1))
        return


# ---- players -------------------------------------------------------------------------------------


async def test_the_seed_draws_the_players_seat_if_it_is_not_given():
    async def seat(**data):
        env = TextArenaEnv("Dice-v0", opponents=[plays, plays], player_id=None)
        _, (step,) = await play(env, data, ["end"])
        assert step.reward == step.info["player_id"] / 4
        return step.info["player_id"]

    seats = [await seat(seed=k) for k in range(20)]
    assert set(seats) == {0, 1, 2}
    assert seats == [await seat(seed=k) for k in range(20)]
    assert [await seat(seed=5, player_id=k) for k in range(3)] == [0, 1, 2]


async def test_opponents_play_their_seats_in_order_plain_or_async():
    threads, seen = set(), []

    def plain(observation):
        threads.add(threading.current_thread())
        seen.append("plain")
        return "a"

    async def waits(observation):
        seen.append("async")
        return "b"

    env = TextArenaEnv("Dice-v0", opponents=[plain, waits], player_id=1)
    _, steps = await play(env, {"seed": 1}, ["go", "end"])
    assert seen == ["plain", "async", "plain"]
    assert threading.main_thread() not in threads
    assert steps[-1].info["rewards"] == {0: 0.0, 1: 0.25, 2: 0.5}


# ---- games that are odd --------------------------------------------------------------------------


def test_a_turn_with_nothing_new_says_so():
    register("Silent-v0", lambda: Dice(say=False))
    _, (step,) = asyncio.run(play(TextArenaEnv("Silent-v0"), {"seed": 1}, ["go"]))
    assert step.messages == user("[GAME] Your turn.")


def test_a_game_that_cannot_be_copied_is_made_for_each_episode():
    made = []

    class Locked(Dice):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()
            made.append(self)

    register("Locked-v0", Locked)
    env = TextArenaEnv("Locked-v0")
    first, again = (asyncio.run(copy.deepcopy(env).reset({"seed": 1})) for _ in range(2))
    assert first == again
    assert len(made) == 4  # One showed how many players the game takes.


def test_word_games_share_their_dictionary():
    env = TextArenaEnv("Wordle-v0")
    opening, (step,) = asyncio.run(play(env, {"seed": 3}, ["[apple]"]))
    assert "5-letter word" in opening[0]["content"]
    assert step.messages[0]["content"].startswith("[GAME] You submitted [apple]")
    games = [env._template.copy() for _ in range(2)]
    while isinstance(games[0], ta.Wrapper):
        games = [game.env for game in games]
    assert games[0].dictionary is games[1].dictionary
    assert games[0].word_list is not games[1].word_list


async def test_a_step_without_a_game_is_refused():
    env = TextArenaEnv("Dice-v0")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"no episode under way: call reset first\.$"):
            await env.step("go")
        await play(env, {"seed": 1}, ["go", "end"])


def test_an_opponent_may_end_the_game():
    env = TextArenaEnv("Dice-v0", opponents=lambda seen: "end", player_id=0)
    _, (step,) = asyncio.run(play(env, {"seed": 1}, ["go"]))
    assert (step.terminated, step.info["rewards"]) == (True, {0: 0.0, 1: 0.25, 2: 0.5})


ANY = {"opponents": plays, "player_id": None}
DATA = r"^(data|player_id).*\.$"
UNJUDGED = {f"Unjudged{k}-v0": end for k, end in enumerate(({1: 0.5}, {0: "Lost."}, {0: None}))}
"""Games that end without a reward for the first player."""
for name, end in UNJUDGED.items():
    register(name, partial(Dice, end=end))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"data": 7, **ANY}, TypeError, DATA),
        ({"data": {"seed": "a"}, **ANY}, TypeError, DATA),
        ({"data": {"sed": 3}, **ANY}, ValueError, DATA),
        ({"data": {"seed": 1, "player_id": 2}, **ANY}, ValueError, DATA),
        ({"data": {"seed": 1, "player_id": "1"}, **ANY}, ValueError, DATA),
        (
            {"data": {"player_id": 1}},
            ValueError,
            r"data\['player_id'\] must be 0,.*got 1: .*None.*\.$",
        ),
        ({"num_players": 2}, ValueError, "opponents must play the 1 other seats"),
        ({"opponents": [plays], "num_players": 3}, ValueError, "got 1 of them"),
        ({"opponents": [plays, 3]}, TypeError, "opponents must be a function"),
        ({"opponents": plays, "player_id": 2}, ValueError, "player_id must be one of the 2"),
        ({"player_id": True}, ValueError, "player_id"),
        ({"num_players": 0}, ValueError, "num_players"),
        ({"colour": "red"}, TypeError, "colour"),
        ({"name": "No"}, ValueError, "env_id must be a registered game of .* got 'No'"),
        (
            {"name": "TicTacToe-v0"},
            ValueError,
            r"T.*-v0 does not begin with num_players=1 .* received 1\. Opp",
        ),
        ({"opponents": lambda _: "end", "player_id": 1}, RuntimeError, "model's player 1: so"),
        ({"opponents": lambda _: 4}, TypeError, r"opponents must return .* got 4 .* player 1\.$"),
        *(
            ({"name": name}, ValueError, "without a reward for player 0: its re")
            for name in UNJUDGED
        ),
    ],
)
def test_wrong_calls_are_refused(arguments, error, message):
    arguments = {"name": "Dice-v0", "data": {"seed": 1}, **arguments}
    name, data = arguments.pop("name"), arguments.pop("data")
    move = "end" if name in UNJUDGED else "go"
    with pytest.raises(error, match=message):
        asyncio.run(play(TextArenaEnv(name, **arguments), data, [move]))


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ImportError, match=r"TextArenaEnv needs .* pip install textarena"):
        TextArenaEnv("Dice-v0")


# ---- copies and collectors -----------------------------------------------------------------------


async def test_copies_share_the_constructed_game_and_play_their_own():
    env = TextArenaEnv("Dice-v0")
    assert copy.deepcopy(env)._template is env._template
    await env.reset({"seed": 1})
    copied = copy.deepcopy(env)
    assert (await env.step("go")) == (await copied.step("go"))
    assert (await env.step("end")).done
    assert not (await copied.step("go")).done
    pickled = pickle.loads(pickle.dumps(TextArenaEnv("Nim-v0", opponents=plays)))
    assert await pickled.reset({"seed": 1})


@pytest.mark.parametrize("name", ["GuessTheNumber-v0", "TicTacToe-v0"])
def test_a_collector_plays_games_that_its_seeds_determine(name):
    number = in_fast_tier(4, 12)

    def answer(prompt):
        moves = GAMES[name]
        return moves[zlib.crc32(prompt.encode()) % len(moves)]

    def run(**kwargs):
        opponents = None if name.startswith("Guess") else plays
        env = TextArenaEnv(name, opponents=opponents, player_id=None)
        return collect(env, answer, number=number, limits=Limits(max_turns=6), **kwargs)

    at_once = run()
    assert at_once == run(max_concurrency=1)
    for played in at_once:
        assert all(reward == 0.0 for reward in played.rewards[:-1])
        end = played.infos[-1]
        assert end is None or played.rewards[-1] == np.float32(end["rewards"][end["player_id"]])


@pytest.mark.slow
def test_games_run_in_worker_processes():
    env, options = TextArenaEnv("TicTacToe-v0", opponents=plays), CollectorOptions(env_workers=2)
    assert collect(env, plays, number=6) == collect(env, plays, number=6, options=options)
