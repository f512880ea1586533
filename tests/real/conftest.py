"""A pretrained model, if there is one: TORCHRL_MT_REAL_MODEL names its folder (.ci/real_model.py).

The figures that the tests ask for are those of SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import os

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = "TORCHRL_MT_REAL_MODEL"


@pytest.fixture(scope="session")
def folder() -> str:
    if FOLDER not in os.environ:
        pytest.skip(f"{FOLDER} names no model: .ci/real_model.py writes one")
    return os.environ[FOLDER]


@pytest.fixture(scope="session")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder):
    """The model as it comes; tests leave it as it is."""
    return AutoModelForCausalLM.from_pretrained(folder).eval()
