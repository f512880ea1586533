"""A misspelt key is an error; what an environment does not read may be there."""

import pytest

from torchrl_mt.envs import Arithmetic, GuessNumber

ACCEPTED = {GuessNumber: ("number", "seed"), Arithmetic: ("expression", "answer", "seed")}
VALUES = {"number": 7, "seed": 3, "expression": "1 + 1", "answer": "2"}


def slips(name):
    """The name with a letter lost, doubled or changed, two exchanged, in capitals, in the plural."""
    for k in range(len(name)):
        yield name[:k] + name[k + 1 :]
        yield name[: k + 1] + name[k:]
        yield name[:k] + "x" + name[k + 1 :]
        yield name[:k] + name[k : k + 2][::-1] + name[k + 2 :]
    yield from (name.upper(), name.capitalize(), name + "s", "_" + name)


@pytest.mark.parametrize(
    ("env", "name"), [(env, name) for env, names in ACCEPTED.items() for name in names]
)
def test_a_slip_of_the_pen_is_named(env, name):
    for key in {*slips(name)} - {name}:
        data = {key: VALUES[name]}
        if name == "answer":
            data["expression"] = "one and one"
        with pytest.raises(ValueError, match=rf"'{key}'.*'{name}'") as error:
            env().reset(data)
        assert all(repr(accepted) in str(error.value) for accepted in ACCEPTED[env])


OTHERS = dict.fromkeys(("task_id", "label", "reference", "index", "id", "question"), "x")


@pytest.mark.parametrize("env", ACCEPTED)
@pytest.mark.parametrize(
    "data",
    [{}, {"prompt": "x"}, {3: 4}, {"seed": 3, "seeds": [3], "number": 7, "numbers": 16}, OTHERS],
)
def test_what_is_not_read_may_be_there(env, data):
    env().reset(data)


def test_an_answer_to_nothing_is_refused():
    with pytest.raises(ValueError, match=r"data\[\"expression\"\].*\['answer', 'question'\]"):
        Arithmetic().reset({"question": "1 + 1", "answer": "2"})
