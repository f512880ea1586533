"""What the collectors' tests share."""

from tests.collectors.conftest import idle_clock, time_to_close  # noqa: F401
