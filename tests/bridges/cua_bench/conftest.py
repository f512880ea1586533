"""What tests of collectors share."""

from tests.collectors.conftest import idle_clock, time_to_close

__all__ = ["idle_clock", "time_to_close"]
