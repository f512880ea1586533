"""Questions of reasoning-gym: the data set's own questions and rewards, however they are chosen."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys

import numpy as np
import pytest

from tests.bridges.collecting import collect
from tests.refusals import check_refused, refused
from tests.tiers import first_fast
from tests.waiting import in_thread
from torchrl_mt.bridges.reasoning_gym import ReasoningGymEnv
from torchrl_mt.bridges.reasoning_gym.evaluated_answers import harmless
from torchrl_mt.collectors import CollectorOptions

gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")

from reasoning_gym.composite import DatasetSpec  # noqa: E402
from reasoning_gym.factory import DATASETS  # noqa: E402
from reasoning_gym.utils import extract_answer  # noqa: E402

NAMES = sorted(DATASETS.keys() - {"composite"})
PARTS = [DatasetSpec("chain_sum", 2, {}), DatasetSpec("leg_counting", 1, {})]


def asked(env, data):
    (message,) = env.reset(data)
    assert message["role"] == "user"
    return message["content"]


def test_questions_and_rewards_are_those_of_the_data_set():
    env = ReasoningGymEnv("chain_sum", size=20, seed=5, min_terms=3)
    dataset = gym.create_dataset("chain_sum", size=20, seed=5, min_terms=3)
    assert len(env) == 20
    for index, entry in enumerate(dataset):
        for answer in (entry["answer"], "no", f"about {entry['answer']} or so"):
            assert asked(env, {"index": np.int64(index)}) == entry["question"]
            step = env.step(f"It is <answer> {answer}</answer>.")
            assert (step.reward, step.terminated) == (dataset.score_answer(answer, entry), True)
            assert step.info == {"answer": answer, "dataset": "chain_sum"}


def test_seeds_go_through_all_questions():
    env = ReasoningGymEnv("chain_sum", size=7)
    questions = [asked(env, {"index": k}) for k in range(7)]
    assert [asked(env, {"seed": k}) for k in range(-7, 21)] == questions * 4
    assert len(set(questions)) == 7
    dataset = gym.create_dataset("chain_sum", size=7, seed=0)
    assert questions == [entry["question"] for entry in dataset]


def test_an_entry_is_a_question():
    dataset = gym.create_dataset("chain_sum", seed=9, size=3)
    env = ReasoningGymEnv("chain_sum")
    assert asked(env, dataset[2]) == dataset[2]["question"]
    assert env.step(dataset[2]["answer"]).reward == 1.0


@pytest.mark.parametrize("make", [
    lambda: ReasoningGymEnv("composite", size=12, seed=3, datasets=PARTS),
    lambda: ReasoningGymEnv(gym.create_dataset("composite", size=12, seed=3, datasets=PARTS)),
])  # fmt: skip
def test_composite_data_sets(make):
    env, dataset = make(), gym.create_dataset("composite", size=12, seed=3, datasets=PARTS)
    sources = set()
    for index, entry in enumerate(dataset):
        assert asked(env, {"index": index}) == entry["question"]
        step = env.step(entry["answer"])
        assert step.reward == 1.0
        assert step.info["dataset"] == entry["metadata"]["source_dataset"]
        sources.add(step.info["dataset"])
    assert sources == {"chain_sum", "leg_counting"}


@pytest.mark.parametrize(
    ("response", "answer", "tagged"),
    [
        ("<answer>3</answer>", "3", "3"),
        ("<answer>3</answer> no, <answer>\n4 </answer>", "4", "4"),
        (" 3\n", "3", None),
        ("<answer>3", "<answer>3", None),
        ("", "", None),
        ("<answer></answer>", "", ""),
    ],
)
def test_how_an_answer_is_taken(response, answer, tagged):
    for env, expected in (
        (ReasoningGymEnv("chain_sum"), answer),
        (ReasoningGymEnv("chain_sum", answer=extract_answer), tagged),
    ):
        env.reset({"index": 0})
        assert env.step(response).info["answer"] == expected


def test_a_system_prompt_comes_first():
    env = ReasoningGymEnv("chain_sum", system_prompt="Think.")
    assert [message["role"] for message in env.reset({"index": 0})] == ["system", "user"]


def test_an_answer_that_scoring_fails_on_is_no_answer():
    env = ReasoningGymEnv("prime_factorization")
    env.reset({"index": 0})
    entry = env._entry
    step = env.step("two times three")
    assert step.reward == gym.create_dataset("prime_factorization").score_answer(None, entry) == 0.0
    assert step.info["error"].startswith("ValueError: invalid literal for int()")


def test_scoring_that_fails_on_no_answer_too_is_an_error():
    class Broken(type(gym.create_dataset("chain_sum"))):
        def score_answer(self, answer, entry):
            raise OSError("the judge is gone")

    env = ReasoningGymEnv(Broken(gym.create_dataset("chain_sum").config))
    env.reset({"index": 0})
    with pytest.raises(OSError, match="the judge is gone"):
        env.step("3")


# ---- programs in answers -------------------------------------------------------------------------

EVALUATE = ["string_insertion", "countdown", *(
    name for name in NAMES
    if {"eval", "parse_expr", "sympify"}
    & set(inspect.getsource(DATASETS[name][0].score_answer).replace("(", " ").replace(".", " ").split())
)]  # fmt: skip
EVALUATE = list(dict.fromkeys(EVALUATE))


@pytest.mark.parametrize("name", first_fast(EVALUATE, 2))
def test_no_answer_is_run_as_a_program(name, tmp_path):
    made = tmp_path / "made by the answer"
    program = f"__import__('pathlib').Path({str(made)!r}).touch()"
    env = ReasoningGymEnv(name, size=3)
    env.reset({"index": 1})
    entry = env._entry
    dataset = env._questions.dataset
    worst = min(dataset.score_answer(answer, entry) for answer in ("(", None))
    for answer in (program, f"\t{program}", f"sin({program})", f"[{program}]", f"{program} + 3!"):
        env.reset({"index": 1})
        assert env.step(answer).reward <= max(worst, 0.05)
        assert not made.exists()
    if name != "number_sorting":  # It evaluates its own answers only.
        dataset.score_answer(program, entry)
        assert made.exists(), "the data set evaluates nothing: is harmless() needed?"


def test_every_data_set_that_evaluates_is_known():
    """Evaluation happens in score_answer itself, where harmless() looks, not in a helper of it."""
    known = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "countdown"}
    known |= {"puzzle24", "simple_integration", "polynomial_multiplication"}
    assert known <= set(EVALUATE)
    for name in EVALUATE:
        assert harmless("exit()", DATASETS[name][0].score_answer, "7") == "("


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_data_set(name):
    """Its right answers score as they do without us, and no answer raises or runs."""
    env = ReasoningGymEnv(name, size=3, seed=2)
    dataset = gym.create_dataset(name, size=3, seed=2)
    entry = dataset[1]
    for answer in (entry["answer"], "junk (", "[1, 2]", "{}", "3", "", None):
        assert asked(env, entry) == entry["question"]
        env._answer = lambda response, answer=answer: answer
        step = env.step("")
        if "error" not in step.info:
            assert step.reward == dataset.score_answer(answer, entry)
    assert asked(env, {"index": 1}) == entry["question"]


# ---- what is refused -----------------------------------------------------------------------------


MADE = gym.create_dataset("chain_sum")


def reset(data):
    ReasoningGymEnv("chain_sum").reset(data)


def step(answer):
    env = ReasoningGymEnv("chain_sum", answer=answer)
    env.reset({"index": 0})
    env.step("33")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused("must choose a question by one of", reset, None),
        refused("got ['label']", reset, {"label": 3}),
        refused("got ['index', 'seed']", reset, {"seed": 1, "index": 1}),
        refused("nearly 'index'", reset, {"idnex": 1}),
        refused("from 0 below 500, got 500", reset, {"index": 500}, error=IndexError),
        refused("from 0 below 500, got -1", reset, {"index": -1}, error=IndexError),
        refused("must be an integer", reset, {"index": "1"}, error=TypeError),
        refused("has no ['metadata']", reset, {"question": "3 + 4?", "answer": "7"}),
        refused("data must be a mapping", reset, 3, error=TypeError),
        refused("'no_such' cannot be made: Dataset 'no_such' not reg", ReasoningGymEnv, "no_such"),
        refused("cannot be made: min_terms", ReasoningGymEnv, "chain_sum", min_terms=0),
        refused("colour", ReasoningGymEnv, "chain_sum", colour=0, error=TypeError),
        refused("data set of reasoning-gym or its name", ReasoningGymEnv, [1, 2], error=TypeError),
        refused("settings are … got ['seed']", ReasoningGymEnv, MADE, seed=3, error=TypeError),
        refused("answer must be a func", ReasoningGymEnv, "chain_sum", answer="x", error=TypeError),
        refused("answer must return a text or None, got 2", step, len, error=TypeError),
    ],
)
def test_wrong_calls_are_refused(call, error, text):
    check_refused(call, error, text)


def test_a_step_without_a_question_is_refused():
    env = ReasoningGymEnv("chain_sum")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"no episode under way: call reset first\.$"):
            env.step("3")
        env.reset({"index": 0})
        env.step("3")


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match="pip install reasoning-gym"):
        ReasoningGymEnv("chain_sum")


# ---- copies and collectors -----------------------------------------------------------------------


def test_copies_share_the_data_set_and_nothing_else():
    env = ReasoningGymEnv("chain_sum", size=5)
    env.reset({"index": 1})
    copied = copy.deepcopy(env)
    assert copied._questions is env._questions
    question = asked(copied, {"index": 2})
    right = env._entry["answer"]
    assert env.step(right).reward == 1.0
    assert asked(pickle.loads(pickle.dumps(env)), {"index": 2}) == question


@pytest.mark.parametrize("name", ["maze", "pool_matrix"])
def test_questions_do_not_depend_on_who_else_asks(name):
    """These data sets generate from attributes, and from numpy's global generator."""
    env = ReasoningGymEnv(name, size=8)
    alone = [asked(env, {"index": k}) for k in range(8)]
    state = np.random.get_state()[1].tolist()  # noqa: NPY002

    def ask(k):
        mine = copy.deepcopy(env)
        return [asked(mine, {"index": i % 8}) for i in range(k, k + 8)]

    found = [in_thread(ask, k) for k in range(8)]
    assert all(found[k]() == alone[k:] + alone[:k] for k in range(8))
    assert np.random.get_state()[1].tolist() == state  # noqa: NPY002


def answers(prompt):
    """The sum that a question of ``chain_sum`` asks for, if it is even."""
    words = prompt.split("user")[-1].replace("=", " ").split()
    terms = "".join(word for word in words if word in "+-" or word.isdigit())
    value = sum(int(term) for term in terms.replace("-", "+-").split("+"))
    return f"<answer>{value if value % 2 == 0 else 'odd'}</answer>"


@pytest.mark.parametrize("data", [None, "entries", "indices"])
def test_a_collector_asks(data):
    env = ReasoningGymEnv("chain_sum", size=6, min_digits=1, max_digits=2)
    dataset = gym.create_dataset("chain_sum", size=6, min_digits=1, max_digits=2, seed=0)
    given = {"entries": dataset, "indices": [{"index": k} for k in range(len(env))]}.get(data)
    played = collect(env, answers, given, number=6)
    expected = sorted(float(int(entry["answer"]) % 2 == 0) for entry in dataset)
    assert sorted(episode.rewards[0] for episode in played) == expected
    assert [len(episode.rewards) for episode in played] == [1] * 6
    right = {entry["answer"] for entry in dataset}
    for episode in played:
        assert (episode.infos[0]["answer"] in right) == (episode.rewards == [1.0])


@pytest.mark.slow
def test_questions_are_the_same_in_worker_processes():
    env = ReasoningGymEnv("chain_sum", size=6, min_digits=1, max_digits=2)
    options = CollectorOptions(env_workers=2)
    assert collect(env, answers, number=6) == collect(env, answers, number=6, options=options)
