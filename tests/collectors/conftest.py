"""No test of this folder may hang: one that takes too long is interrupted, again and again."""

from __future__ import annotations

import signal

import pytest

SECONDS = 90.0


@pytest.fixture(autouse=True)
def interrupted_when_it_hangs():
    def give_up(*_):
        raise TimeoutError(f"the test took more than {SECONDS:.0f} seconds.")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, SECONDS, 2.0)  # again, to get through clean-ups that hang
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
