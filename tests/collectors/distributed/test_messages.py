"""What travels between a collector and its workers: all of it, and not more."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from torchrl_mt.collectors import Episode, Turn
from torchrl_mt.collectors.distributed.messages import Played
from torchrl_mt.collectors.distributed.weights import (
    PackedWeights,
    PickledWeights,
    SharedWeights,
    pack_weights,
)
from torchrl_mt.collectors.prompt import Prompt
from torchrl_mt.collectors.workflow import Rejected
from torchrl_mt.engines import Completion
from torchrl_mt.processes import answer, read_answer, read_failure
from torchrl_mt.vision import StoredImage


def conversation(turns, tokens=20, image=None):
    """An episode of ``turns`` turns, each of ``tokens`` from the environment and from the model."""
    line, found = [], []
    images = () if image is None else (image,)
    for turn in range(turns):
        line += range(1000 * turn, 1000 * turn + tokens)
        prompt = Prompt(line, len(line), images)
        sampled = list(range(150_000, 150_000 + tokens))
        log_probs = [-0.1 * k for k in range(tokens)]
        answered = Completion(sampled, log_probs, [turn] * tokens, "stop")
        found.append(Turn(prompt, answered, images=images))
        line += sampled
    return Episode({"k": 1}, 1, 2, found)


def test_a_record_grows_with_its_tokens_and_not_with_their_square():
    sizes = {n: len(answer(Played.of(conversation(n), None))[1]) for n in (10, 100, 200)}
    assert sizes[200] / sizes[100] < 2.2
    assert sizes[200] < 32 * 200 * 40  # bytes per token, of prompts and answers
    assert sizes[10] > 10


def test_records_arrive_as_they_were():
    image = StoredImage.of(np.zeros((64, 64, 3), np.uint8))
    played = conversation(4, image=image)
    answered = answer(Played.of(played, None))
    assert len(answered[1]) < 2 * 64 * 64 * 3
    arrived = Episode({"k": 1}, 1, 2)
    read_answer(*answered).enter(arrived)
    assert arrived == played
    assert arrived.turns[3].prompt_ids.line is arrived.turns[0].prompt_ids.line
    assert arrived.turns[3].images[0] is image
    assert arrived.parents() == played.parents()


def test_errors_arrive_with_their_traceback_and_what_cannot_be_sent_is_an_error():
    def fail():
        raise Rejected("declined", "for a reason")

    try:
        fail()
    except Rejected as error:
        played = Played.of(conversation(3), error)
    assert played.turns == []
    arrived = read_failure(read_answer(*answer(played)).error)
    assert (type(arrived), arrived.cause, str(arrived)) == (Rejected, "declined", "for a reason")
    assert "in fail" in str(arrived.__cause__)
    with pytest.raises(TypeError, match=r"an engine returns .* pickling it raised"):
        read_answer(*answer(threading.Lock()))


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
tensors = st.builds(
    lambda shape, dtype: (torch.randn(shape) * 3).to(dtype),
    st.lists(st.integers(0, 4), max_size=3),
    dtypes,
)


@given(st.dictionaries(st.text(max_size=3), tensors, min_size=1))
def test_weights_arrive_as_they_were(given_tensors):
    packed = pack_weights(given_tensors)
    for weights in (packed, pickle.loads(pickle.dumps(packed)), SharedWeights(packed)):
        arrived = weights.unpack()
        assert list(arrived) == list(given_tensors)
        for name, tensor in given_tensors.items():
            assert arrived[name].dtype == tensor.dtype
            assert torch.equal(arrived[name], tensor)


def test_what_engines_take_as_weights_is_packed():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(2.0)
    arrived = pack_weights(model).unpack()
    assert arrived.keys() == model.state_dict().keys()
    td = TensorDict.from_module(model)
    assert isinstance(pack_weights(td).unpack(), TensorDict)
    assert set(pack_weights(td).unpack().keys()) == set(model.state_dict())
    assert isinstance(pack_weights("a/path"), PickledWeights)
    assert pack_weights("a/path").unpack() == "a/path"


def test_tied_weights_are_sent_once():
    big = torch.randn(1000, 10).T
    packed = PackedWeights({"a": big, "b": big, "c": big[:5]})
    assert packed.block.nbytes < 1.6 * big.nbytes
    assert torch.equal(packed.unpack()["b"], big)
    assert torch.equal(packed.unpack()["c"], big[:5])
