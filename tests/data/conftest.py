import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, takewhile

import pytest

from tests.data import makers


@pytest.fixture(scope="session")
def make():
    """Makers of episodes, and what to compare them by."""
    return makers


@contextmanager
def _meanwhile(*works):
    """Call each function in a thread of its own, with 0, 1, 2..., until the body has ended.

    What one of them raises, the context raises at its end.
    """
    stop = threading.Event()

    def run(work):
        for k in takewhile(lambda _: not stop.is_set(), count()):
            work(k)

    with ThreadPoolExecutor(len(works)) as threads:
        running = [threads.submit(run, work) for work in works]
        try:
            yield
        finally:
            stop.set()
        for each in running:
            each.result()


@pytest.fixture(scope="session")
def meanwhile():
    """A context in which other threads are at work."""
    return _meanwhile


@pytest.fixture
def said(caplog):
    """What the library has warned of so far."""
    with caplog.at_level(logging.WARNING, logger="torchrl_mt"):
        yield lambda: [record.getMessage() for record in caplog.records]
