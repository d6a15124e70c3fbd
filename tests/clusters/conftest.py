"""A Ray cluster that the tests of a module share."""

import os

import pytest
from nodes import two_nodes

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of two cores."""
    with two_nodes(2) as made:
        yield made
