"""Shared by the tests of layers: poisoned memory."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _poisoned_memory(poisoned_memory: None) -> None:
    """Fresh memory is NaN in every test here."""
