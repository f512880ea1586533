"""What is no flat sequence of token ids is refused, with advice that fits what came."""

from __future__ import annotations

import re
from array import array
from collections import UserDict, deque

import numpy as np
import pytest
import torch

from torchrl_mt.checks import check_token_ids

IDS = [5, 0, 7]
EIGHT = b"guess it"
"""As many bytes as a number of an array has."""


@pytest.mark.parametrize(
    "kind", [list, tuple, iter, deque, torch.tensor, np.array, lambda ids: array("i", ids)]
)
def test_token_ids_come_in_any_flat_sequence(kind):
    assert check_token_ids(kind(IDS)) == IDS


@pytest.mark.parametrize("tokens", ["guess it", EIGHT, bytearray(EIGHT), b"", EIGHT[1:]])
def test_text_is_to_be_tokenized(tokens):
    message = f"prompt_ids must be .* got {type(tokens).__name__}: tokenize it first"
    with pytest.raises(TypeError, match=message):
        check_token_ids(tokens)


@pytest.mark.parametrize(
    ("tokens", "came"),
    [
        (["guess", "it"], "list of str: tokenize it first."),
        ([5, "it"], "list of str: tokenize it first."),
        ([EIGHT], "list of bytes: tokenize it first."),
        ([IDS, IDS], "list of list: take one row of it."),
        ((tuple(IDS),), "tuple of tuple: take one row of it."),
        (torch.tensor([IDS]), "Tensor of shape [1, 3]: take one row of it."),
        (torch.tensor([[5], [7]]), "Tensor of shape [2, 1]: take one row of it."),
        (np.array([[5], [7]]), "ndarray of shape [2, 1]: take one row of it."),
        (UserDict(input_ids=IDS), "UserDict: of a tokenizer's output take ['input_ids']."),
        ([{"input_ids": IDS}], "list of dict: of a tokenizer's output take ['input_ids']."),
        ([5, 7.0], "list of float."),
        (torch.tensor([5.0]), "Tensor."),
        (torch.tensor(5), "Tensor."),
        (5, "int."),
        (None, "NoneType."),
    ],
)
def test_the_advice_fits_what_came(tokens, came):
    with pytest.raises(TypeError, match=re.escape(f"flat sequence of token ids, got {came}")):
        check_token_ids(tokens)
