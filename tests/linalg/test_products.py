"""Parts of products, and products of few digits."""

import pytest
import torch

import problems
from coec.linalg import products
from coec.linalg.products import lower_gram, rounded_products
from coec.linalg.stiefel import retract_cholesky, tangent
from tolerances import EXACT


@pytest.mark.parametrize("strip", [1, 2, 3, 5, 7, 100])
def test_the_lower_triangle_is_all_that_a_retraction_needs(monkeypatch, strip):
    R, xi = problems.orthonormal(9, 7).T, problems.weight(7, 9)
    xi = tangent(R, xi)
    expected = retract_cholesky(R, xi, 0.3)
    monkeypatch.setattr(products, "STRIP", strip)
    G = xi @ xi.T
    torch.testing.assert_close(lower_gram(xi).tril(), G.tril(), rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(retract_cholesky(R, xi, 0.3), expected, rtol=EXACT, atol=EXACT)


def test_products_are_rounded_on_tensor_cores_alone_and_for_as_long_as_asked():
    def fails():
        with rounded_products(torch.device("cuda")):
            seen.append(torch.get_float32_matmul_precision())
            raise KeyError

    before, seen = torch.get_float32_matmul_precision(), []
    with pytest.raises(KeyError):
        fails()
    assert seen == ["high"] != [before]
    assert torch.get_float32_matmul_precision() == before
    with rounded_products(torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == before
