"""What tests of experience share."""

from tests.objectives.conftest import model, other_model, rows

__all__ = ["model", "other_model", "rows"]
