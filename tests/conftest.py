"""What the tests share: a chat model small enough to build on the spot."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal

import pytest

# The models are tiny: more threads only wait for each other. Also for scripts that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from torchrl_mt.testing import tiny_chat_model, tiny_chat_tokenizer

from .tiers import pytest_collection_modifyitems, pytest_configure  # noqa: F401
from .waiting import PATIENCE

# The same examples in every run: a commit that passed passes again. How long one takes says more
# about the machine than about the code. To look for new ones: pytest --hypothesis-profile=explore
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=25)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.register_profile("fast", settings.get_profile("repeatable"), max_examples=6)
settings.load_profile("repeatable")

# Some tests press Ctrl-C, which a shell that starts them in the background has had ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

WORDS = ["guess", "to", "higher", "lower", "correct", "invalid", *map(str, range(1, 17))]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run an ``async`` test on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def interrupted_when_it_hangs():
    def give_up(*_):
        raise TimeoutError(f"the test took more than {PATIENCE:.0f} seconds.")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE, 2.0)  # again, to get through clean-ups that hang
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_chat_tokenizer(WORDS)


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return tiny_chat_model(WORDS, hidden_size=32, intermediate_size=64)[0]
