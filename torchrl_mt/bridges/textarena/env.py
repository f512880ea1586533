"""Games of TextArena, in which the model has one seat and given players have the others.

A seed determines a game however many are played at the same time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from torchrl_mt.bridges.textarena.games import GameTemplate, accept_swapped_arguments
from torchrl_mt.checks import check_positive_integer
from torchrl_mt.envs import Message, TextEnv, TextStep
from torchrl_mt.seeds import EpisodeGenerators, drawing_from, read_item, seed_of
from torchrl_mt.threads import call_in_thread, call_user

__all__ = ["TextArenaEnv"]

_GAME = -1
"""TextArena's number for the game itself as the sender of a message."""


class TextArenaEnv(TextEnv):
    """A game of TextArena (``pip install textarena``).

    A user's message has all that the model's player has observed since its last turn. TextArena judges
    games as a whole: the reward of the last turn is what the game gives the model's player, all others
    are 0. ``info`` of the last turn has the ``rewards`` of all players and the ``reason`` of the end. A
    game that reaches its own limit of turns terminates. :doc:`/bridges` has all entries of ``info``,
    examples and hints for single games.

    The episode's data sets the game, ``{"seed": 3}``, and the model's player if ``player_id`` is
    ``None``: ``{"seed": 3, "player_id": 1}``. If it has no seed, its content determines one: the item
    ``{"label": 1}`` is the same game each time, for a whole group. ``None`` draws a seed. Games with the
    same seed, moves and players are the same, whatever else runs in the process.

    Args:
        env_id: name of a registered game, such as ``"Wordle-v0"``.
        opponents: who plays the other seats: a function for all of them, or a list with one for each, in
            the order of their players. It is called with TextArena's observation, in most games a text
            of the whole game so far, and returns a move. Plain functions run in threads, ``async`` ones
            on the event loop. All episodes share them.
        num_players: number of players; by default 1 without ``opponents``, one more than a list has, or
            2 with a function.
        player_id: the model's player, from 0. ``None`` means the one that the data names, or else one
            that the seed draws. Data that names another one is refused.
        system_prompt: a system message to begin with; none if ``None``.
        dialogue: whether the model sees the dialogue so far. If ``False``, it sees only TextArena's
            observation, as the wrappers of ``env_id`` write it. Every turn is then a training row of its
            own.
        **options: further arguments of ``textarena.make``, such as ``max_turns=20``.

    Raises:
        ImportError: if TextArena is not installed.
        TypeError: if ``opponents`` are not callable, or the game does not take the ``options``.
        ValueError: if there is no such game or player, or the numbers of players do not fit.
        Exception: the error of a game that cannot be made.

    Examples:
        >>> env = TextArenaEnv("GuessTheNumber-v0")  # doctest: +SKIP
    """

    def __init__(
        self,
        env_id: str,
        *,
        opponents: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        num_players: int | None = None,
        player_id: int | None = 0,
        system_prompt: str | None = None,
        dialogue: bool = True,
        **options: Any,
    ) -> None:
        self.opponents = _players(opponents, num_players)
        self.num_players = 1 + len(self.opponents)
        if player_id is not None:
            _check_player(player_id, self.num_players)
        self.env_id = env_id
        self.player_id = player_id
        self.system_prompt = system_prompt
        self.dialogue = dialogue
        self._template = GameTemplate(env_id, options)
        self._game: Any = None
        """The game under way; ``None`` if there is none."""
        self._generators = EpisodeGenerators(0)
        self._seed = self._player = 0
        self._begin()  # Only a game that begins tells which numbers of players it takes.

    def __deepcopy__(self, memo: dict[int, Any]) -> TextArenaEnv:
        return self._copied(memo, opponents=self.opponents)

    async def reset(self, data: Any = None) -> Sequence[Message]:
        """Begin a game, and play it up to the model's first turn.

        Raises:
            TypeError: if the data is of a wrong type, or an opponent returns no text.
            ValueError: if the data has a misspelt key, or a player that is not there or not the
                environment's ``player_id``, or the game does not begin with this seed.
            RuntimeError: if the game is over before the model's first turn.
            Exception: the error of the game or of an opponent.
        """
        item = read_item(data, ("seed", "player_id"))
        seed = seed_of(data)
        seed = random.SystemRandom().getrandbits(31) if seed is None else seed
        self._player = self._seat(item, seed)
        self._seed, self._game = seed, None
        self._generators = EpisodeGenerators(seed)
        game = await call_in_thread(self._begin)
        turn = await self._up_to_own_turn(game)
        if turn.player is None:
            raise RuntimeError(
                f"the game {self.env_id} was over before the first turn of the model's player "
                f"{self._player}: {_outcome(game, self._player).get('reason')}"
            )
        self._game = game
        return [*self._opening(), _message("user", turn.observed)]

    async def step(self, response: str) -> TextStep:
        """Make the model's move, and play the game up to its next turn.

        Raises:
            RuntimeError: if no game is under way.
            TypeError: if an opponent returns no text.
            ValueError: if the game ended without a reward for the model.
            Exception: the error of the game or of an opponent.
        """
        game, self._game = self._under_way(self._game), None
        turn = await self._up_to_own_turn(game, response)
        if turn.player is None:
            return self._end(game, turn.info)
        self._game = game
        history = None if self.dialogue else self._opening()
        return TextStep([_message("user", turn.observed)], info=turn.info or None, history=history)

    def _seat(self, item: Mapping[str, Any], seed: int) -> int:
        """The model's player in an episode."""
        player = item.get("player_id")
        if self.player_id is not None:
            if player not in (None, self.player_id):
                raise ValueError(
                    f"data['player_id'] must be {self.player_id}, as the environment's player_id, or "
                    f"absent, got {player!r}: make the environment with player_id=None to let the data "
                    "choose."
                )
            return self.player_id
        if player is None:
            return random.Random(f"player of {seed}").randrange(self.num_players)
        return _check_player(player, self.num_players)

    def _opening(self) -> list[Message]:
        return [] if self.system_prompt is None else [_message("system", self.system_prompt)]

    def _begin(self) -> Any:
        """Make a game and begin it."""
        game = self._template.copy()
        try:
            with self._template.turns, drawing_from(self._generators):
                game.reset(num_players=self.num_players, seed=self._seed)
        except (AssertionError, ValueError) as error:
            raise ValueError(
                f"{self.env_id} does not begin with num_players={self.num_players} and seed "
                f"{self._seed}: {str(error).rstrip('.')}. Opponents play the seats of the other players."
            ) from error
        accept_swapped_arguments(game.state)
        return game

    async def _up_to_own_turn(self, game: Any, move: str | None = None) -> _Turn:
        """Make a move, if any, and the opponents' moves up to the model's turn or the end."""
        turn = await call_in_thread(self._after, game, move)
        while turn.player not in (None, self._player):
            opponent = self.opponents[turn.player - (turn.player > self._player)]
            move = await call_user(opponent, turn.observed)
            if not isinstance(move, str):
                raise TypeError(
                    f"opponents must return a move, a text, got {move!r} from the one that plays player "
                    f"{turn.player}."
                )
            turn = await call_in_thread(self._after, game, move)
        return turn

    def _after(self, game: Any, move: str | None) -> _Turn:
        """The turn that a move leads to."""
        with self._template.turns, drawing_from(self._generators):
            done, info = (False, {}) if move is None else game.step(move)
            if done:
                return _Turn(None, None, info)
            player = game.state.current_player_id
            if player != self._player:
                return _Turn(player, game.get_observation()[1], info)
            inner = game
            while self.dialogue and hasattr(inner, "is_wrapped_with"):
                inner = inner.env
            observed = self._text(game, inner.get_observation()[1])
            return _Turn(player, observed or "[GAME] Your turn.", info)

    def _end(self, game: Any, info: Mapping[str, Any]) -> TextStep:
        """The step that ends a game."""
        outcome = {**info, **_outcome(game, self._player), "seed": self._seed}
        reward = outcome["rewards"].get(self._player)
        if not isinstance(reward, Real):
            raise ValueError(
                f"the game {self.env_id} ended without a reward for player {self._player}: its rewards "
                f"are {outcome['rewards']}."
            )
        observed = self._text(game, game.state.observations.get(self._player, ()))
        messages = [_message("user", observed)] if observed else []
        return TextStep(messages, float(reward), done=True, info=outcome)

    def _text(self, game: Any, observed: Any) -> str:
        """Observations as a text, without the model's own moves."""
        if isinstance(observed, str):
            return observed
        names = game.state.role_mapping
        return "\n".join(
            f"[{'GAME' if sender == _GAME else names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in observed
            if not self._is_own_move(sender, kind)
        )

    def _is_own_move(self, sender: Any, kind: Any) -> bool:
        # Some games say that the game sent the move; in others, the arguments are out of order.
        is_move = any(getattr(what, "name", None) == "PLAYER_ACTION" for what in (sender, kind))
        return is_move and (sender == self._player or self.num_players == 1)


class _Turn(NamedTuple):
    """A player's turn."""

    player: int | None
    """Whose turn it is; ``None`` if the game is over."""
    observed: Any
    """The player's observation: a text for the model, what TextArena gives for others."""
    info: Mapping[str, Any]
    """What the game said about the move before."""


def _players(opponents: Any, num_players: int | None) -> list[Callable[[Any], Any]]:
    """The players of the other seats, in order."""
    if num_players is not None:
        check_positive_integer("num_players", num_players)
    if opponents is None or callable(opponents):
        others = (num_players or (1 if opponents is None else 2)) - 1
        players = [] if opponents is None else [opponents] * others
    else:
        players = list(opponents)
        others = len(players) if num_players is None else num_players - 1
        for player in players:
            if not callable(player):
                raise TypeError(
                    f"opponents must be a function of an observation, or a list of them, got {player!r}."
                )
    if len(players) != others:
        raise ValueError(
            f"opponents must play the {others} other seats of num_players={num_players}, got "
            f"{len(players)} of them."
        )
    return players


def _check_player(player: Any, num_players: int) -> int:
    if isinstance(player, bool) or player not in range(num_players):
        raise ValueError(
            f"player_id must be one of the {num_players} players, from 0 to {num_players - 1}, got "
            f"{player!r}."
        )
    return int(player)


def _outcome(game: Any, player: int) -> dict[str, Any]:
    """What TextArena says about the end of a game."""
    rewards, notes = game.close()
    return {**notes.get(player, {}), "player_id": player, "rewards": dict(rewards or {})}


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
