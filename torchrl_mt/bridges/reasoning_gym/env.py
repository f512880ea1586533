"""Questions of reasoning-gym, one an episode, with the rewards of their data set.

No answer of a model is run as a program, though some data sets evaluate answers.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl_mt.bridges.reasoning_gym.evaluated_answers import harmless
from torchrl_mt.envs import Message, TextEnv, TextStep
from torchrl_mt.seeds import (
    EpisodeGenerators,
    drawing_from,
    import_package,
    read_item,
    redirect_draws,
)

__all__ = ["ReasoningGymEnv"]

_ENTRY = ("question", "answer", "metadata")


class ReasoningGymEnv(TextEnv):
    """Questions of a data set of reasoning-gym (``pip install reasoning-gym``).

    The first message is a question, and the response ends the episode. The reward is the data set's
    ``score_answer``, in [0, 1]. An answer that it fails on is scored as no answer is. ``info`` has the
    ``answer`` that was scored, the ``dataset`` that the question came from, and the ``error`` if scoring
    failed.

    The episode's data chooses the question: ``{"index": i}``, from 0 below ``len(env)``, or
    ``{"seed": k}``, which means question ``k % len(env)``. It may also be a question itself, an entry of
    the data set: so a data set may be the collector's ``data``.

    Some data sets evaluate answers as Python, by ``eval`` or sympy. From a model, they get literals, or
    formulas of elementary functions; any other program is scored as an answer that cannot be parsed.
    Making or simplifying a formula may take long: give the collector's
    :class:`~torchrl_mt.collectors.Limits` a ``tool_timeout``, and play slow data sets in
    ``env_workers``.

    Args:
        dataset: name of a data set, such as ``"chain_sum"`` or ``"composite"``, or a data set.
        size: number of questions; 500 by default. For a name only.
        seed: seed of the questions; 0 by default. For a name only.
        system_prompt: a system message to begin with, such as those in
            ``reasoning_gym.utils.SYSTEM_PROMPTS``; none if ``None``.
        answer: called with the content of a response; returns the answer, or ``None`` if there is none.
            By default, that is what the last ``<answer>`` and ``</answer>`` enclose, or else the whole
            content, without white space around it. ``reasoning_gym.utils.extract_answer`` insists on
            the tags.
        **config: further settings of the data set, for a name only.

    Raises:
        ImportError: if reasoning-gym is not installed.
        TypeError: if ``dataset`` is neither, settings do not exist or come with a data set, or
            ``answer`` is not callable.
        ValueError: if there is no data set of this name, or a setting is out of range.

    Examples:
        >>> env = ReasoningGymEnv("chain_sum", size=1000)  # doctest: +SKIP
        >>> collector = MultiTurnCollector(env, engine, episodes_per_batch=64)  # doctest: +SKIP
    """

    def __init__(
        self,
        dataset: Any,
        *,
        size: int | None = None,
        seed: int | None = None,
        system_prompt: str | None = None,
        answer: Callable[[str], str | None] | None = None,
        **config: Any,
    ) -> None:
        if answer is not None and not callable(answer):
            raise TypeError(f"answer must be a function of a response, got {answer!r}.")
        given = {"size": size, "seed": seed}
        given = {key: value for key, value in given.items() if value is not None}
        self._questions = _Questions(dataset, {**given, **config})
        self.system_prompt = system_prompt
        self._answer = answer or _tagged_or_whole
        self._entry: Mapping[str, Any] | None = None
        """The question that was asked; ``None`` if there is none."""

    def __len__(self) -> int:
        """Number of questions."""
        return len(self._questions.dataset)

    def reset(self, data: Any = None) -> Sequence[Message]:
        """Ask the question that the data chooses.

        Raises:
            TypeError: if the data is of a wrong type.
            ValueError: if the data has a misspelt key, chooses no question or several, or is not whole.
            IndexError: if there is no question of this index.
        """
        self._entry = None
        item = read_item(data, ("seed", "index", *_ENTRY))
        self._entry = self._chosen(item)
        said = [("system", self.system_prompt), ("user", self._entry["question"])]
        return [{"role": role, "content": text} for role, text in said if text is not None]

    def step(self, response: str) -> TextStep:
        """Score the answer of a response.

        Raises:
            RuntimeError: if no question was asked.
            TypeError: if ``answer`` returns something else.
            Exception: the error of ``answer``, or of scoring no answer.
        """
        entry, self._entry = self._under_way(self._entry), None
        answer = self._answer(response)
        if answer is not None and not isinstance(answer, str):
            raise TypeError(f"answer must return a text or None, got {answer!r}.")
        dataset = self._questions.of(entry)
        info = {"answer": answer, "dataset": entry["metadata"].get("source_dataset")}
        try:
            scored = harmless(answer, type(dataset).score_answer, entry["answer"])
            reward = dataset.score_answer(scored, entry)
        except Exception as error:  # Of an answer that the data set did not expect.
            info["error"] = f"{type(error).__name__}: {error}"
            reward = dataset.score_answer(None, entry)
        return TextStep(reward=float(reward), done=True, info=info)

    def _chosen(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        ways = [key for key in ("index", "seed", "question") if item.get(key) is not None]
        if len(ways) != 1:
            raise ValueError(
                "data must choose a question by one of 'index', 'seed' or 'question', got "
                f"{ways or sorted(map(str, item))}."
            )
        if ways == ["question"]:
            missing = [key for key in _ENTRY if key not in item]
            if missing:
                raise ValueError(f"data with a question must be an entry, but it has no {missing}.")
            return item
        if ways == ["seed"]:
            return self._questions.entry(item["seed"] % len(self))
        try:
            index = operator.index(item["index"])
        except TypeError:
            raise TypeError(f"data['index'] must be an integer, got {item['index']!r}.") from None
        if not 0 <= index < len(self):
            raise IndexError(f"data['index'] must be from 0 below {len(self)}, got {index}.")
        return self._questions.entry(index)


class _Questions:
    """A data set, which all copies of an environment share.

    Args:
        dataset: a data set or its name.
        config: settings for the name.
    """

    def __init__(self, dataset: Any, config: Mapping[str, Any]) -> None:
        gym = import_package("reasoning_gym", "ReasoningGymEnv")
        redirect_draws("reasoning_gym")
        self._args = (dataset, config)
        # Some data sets keep what they generate from in attributes.
        self._lock = threading.Lock()
        if not isinstance(dataset, str):
            if not all(
                hasattr(dataset, name) for name in ("__len__", "__getitem__", "score_answer")
            ):
                raise TypeError(
                    f"dataset must be a data set of reasoning-gym or its name, got {dataset!r}."
                )
            if config:
                raise TypeError(
                    f"settings are for the name of a data set, got {sorted(config)} and a "
                    f"{type(dataset).__name__}."
                )
            self.dataset = dataset
            return
        try:
            self.dataset = gym.create_dataset(dataset, **{"seed": 0, **config})
        except (AssertionError, ValueError) as error:
            raise ValueError(f"the data set {dataset!r} cannot be made: {error}.") from error

    def entry(self, index: int) -> Mapping[str, Any]:
        """A question of the data set; the same for the same index, in any thread."""
        with self._lock, drawing_from(EpisodeGenerators(index)):
            return self.dataset[index]

    def of(self, entry: Mapping[str, Any]) -> Any:
        """The data set that an entry comes from, which may be a part of a composite one."""
        dataset = self.dataset
        while isinstance(getattr(dataset, "datasets", None), Mapping):
            dataset = dataset.datasets[entry["metadata"]["source_dataset"]]
        return dataset

    def __deepcopy__(self, memo: Any) -> _Questions:
        return self

    def __reduce__(self) -> tuple[type[_Questions], tuple[Any, ...]]:
        return _Questions, self._args


def _tagged_or_whole(response: str) -> str:
    """What the last pair of tags encloses, or else the whole response."""
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(response)
    return response.strip() if answer is None else answer
