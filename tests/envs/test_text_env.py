"""The interface: what a step says about an episode's end, and what a subclass must define."""

import dataclasses

import pytest

from torchrl_mt.envs import TextEnv, TextStep


def test_a_bare_step_goes_on_with_nothing():
    step = TextStep()
    assert step == TextStep((), reward=0.0, done=False, truncated=False, info=None, history=None)
    assert not step.terminated


@pytest.mark.parametrize(
    ("done", "truncated", "terminated"),
    [(False, False, False), (True, False, True), (True, True, False)],
)
def test_done_is_terminated_or_truncated(done, truncated, terminated):
    assert TextStep(done=done, truncated=truncated).terminated is terminated


def test_truncated_without_done_is_refused():
    with pytest.raises(ValueError, match="done=True"):
        TextStep(truncated=True)


@pytest.mark.parametrize("messages", ["higher", {"role": "user", "content": "higher"}])
def test_messages_are_a_list(messages):
    with pytest.raises(TypeError, match=rf"must be a list .* got {type(messages).__name__}"):
        TextStep(messages)


def test_a_step_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TextStep().reward = 1.0


def test_reset_and_step_must_be_defined():
    with pytest.raises(TypeError, match="abstract"):
        TextEnv()


def test_there_may_be_nothing_to_close():
    class Bare(TextEnv):
        reset = step = None

    assert Bare().close() is None
