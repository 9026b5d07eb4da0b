"""Fixtures that several files use."""

import pytest

from engines import Bench


@pytest.fixture
def bench():
    """Makes engines (engines.Bench); each is stopped and checked at the end."""
    made = []

    def make(**fields):
        made.append(Bench(**fields))
        return made[-1]

    yield make
    for each in made:
        each.check()
