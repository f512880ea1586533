from __future__ import annotations

import pytest


@pytest.fixture
def engine():
    """An engine whose answer depends on the prompt's length."""
    helpers = pytest.importorskip("tests.agents.helpers", reason="agents need the extra [agents]")
    return helpers.counting_engine()
