"""What tests of collectors share."""

from tests.collectors.conftest import engine, idle_clock, time_to_close

__all__ = ["engine", "idle_clock", "time_to_close"]
