"""For all tests of the report: a chart whose names leave the drawing no room is an error, not a warning that nobody reads."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _a_collapsed_chart_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="constrained_layout not applied")
        yield
