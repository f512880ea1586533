"""The forms in which handles are taken, and what is said of one whose step has left.

That a handle stays with its step is a part of ``test_model.py``.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.data.handles import HANDLES
from torchrl_mt.data import EpisodeStorage


@pytest.fixture
def stored(make):
    """A storage of steps 3 to 9, from which others have left."""
    storage = EpisodeStorage(7)
    for first, end in pairwise([0, 3, 7, 10]):
        storage.append(make.whole({"number": torch.arange(first, end)}, end - first))
    return storage


def test_a_handle_is_taken_in_every_form(stored):
    for form in (HANDLES + 5, np.int64(HANDLES + 5), torch.tensor(HANDLES + 5), (HANDLES + 5,)):
        step = stored[form]
        assert step.batch_size == ()
        assert int(step["number"]) == 5
        assert stored.places(form[0] if isinstance(form, tuple) else form).shape == ()
    many = torch.tensor([[HANDLES + 4, HANDLES + 9], [0, -1]])
    for form in (many, many.numpy(), many.tolist(), many.flip(1).flip(1)):
        assert stored.get(form)["number"].tolist() == [[4, 9], [3, 9]]
        assert stored.places(form).tolist() == [[1, 6], [0, 6]]
    assert stored[range(HANDLES + 4, HANDLES + 7)]["number"].tolist() == [4, 5, 6]
    # A handle is exact as a double, if it is an integer again.
    assert int(float(HANDLES + 5)) == HANDLES + 5
    assert stored.contains(HANDLES + 3)
    assert not stored.contains(HANDLES + 2)
    assert stored.contains(-7)
    assert not stored.contains(-8)
    assert not stored.contains(HANDLES + 10)


def test_what_is_not_stored_is_said(stored):
    for handle in (HANDLES, HANDLES + 2, HANDLES + 10, 2**62):
        with pytest.raises(IndexError, match=rf"1 steps .*not stored .* such as {handle}: the 7 "):
            stored[handle]
    with pytest.raises(IndexError, match=f"2 steps .* such as {HANDLES}.* from {HANDLES + 3}"):
        stored[[HANDLES, HANDLES + 4, HANDLES + 11]]
    for index in ([HANDLES + 4, 7], HANDLES - 1):
        with pytest.raises(IndexError, match=r"index must lie in \[-7, 7\)"):
            stored[index]
    with pytest.raises(TypeError, match=r"integer dtype, got torch\.float64"):
        stored[[float(HANDLES + 4)]]
