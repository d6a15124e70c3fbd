"""Annotations are checked at run time in small tests, and not where that costs too much."""

import pytest
import torch
from jaxtyping import TypeCheckError

from coec.compensation.objective import kept_columns
from conftest import EVERYWHERE


def test_a_wrong_shape_is_found_here():
    with pytest.raises(TypeCheckError):
        kept_columns(torch.zeros(3), None)


@pytest.mark.skipif(EVERYWHERE, reason="COEC_TYPECHECK=1 checks all tests")
@pytest.mark.unchecked
def test_and_is_not_looked_for_in_a_marked_test():
    with pytest.raises(AttributeError):
        kept_columns(torch.zeros(3), None)
