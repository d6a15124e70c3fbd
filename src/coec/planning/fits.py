"""What reconstructing one half of a block takes (METHODS §8)."""

from dataclasses import dataclass, replace

from coec.planning import operations
from coec.planning.machines import Work
from coec.planning.passes import Passed

LENGTHS_TRIED = 1.3
"""Fractions of a step that are tried, on average."""
DUAL = 11 / 3
"""Products with the fitted weights in an iteration at an MLP: forward, with its derivative, and
back."""
BACK = 2.0
"""What a way back takes beside the way forward, of products that weights before them are fitted in;
half of that where the way ends at the outputs of the fitted modules."""
BACK_ATTENTION = 2.5


@dataclass(frozen=True)
class Half:
    """One half of a pruned block that is fitted.

    Attributes:
        passed: a pass of it over the windows that are fitted.
        held: tokens that are held out.
        matrices: (outputs, inputs) of every fitted matrix, the consumer last.
        attends: whether it is attention.
    """

    passed: Passed
    held: float
    matrices: tuple[tuple[int, int], ...]
    attends: bool

    @property
    def fitted(self) -> float:
        """How many weights are fitted."""
        return float(sum(m * n for m, n in self.matrices))

    def work(self, steps: int, inner: int, curvature: float) -> list[Work]:
        """All steps of it."""
        steps = min(steps, 1) if self.attends else steps
        share = 1 + self.held / self.passed.tokens
        forward = self._scaled(share).forward(1 + LENGTHS_TRIED * steps, attends=self.attends)
        found = [*forward, *self._gradient(steps, 1.0, BACK), *self._gradient(steps, 1.0, BACK / 2)]
        tokens = self.passed.tokens
        for m, n in self.matrices:
            found += [
                Work("product", 2.0 * n * n * tokens, float(n), steps, "float32"),
                Work("elementwise", 4.0 * 6 * (m + n) * tokens, 2.0**22, steps),
            ]
        for number, (m, n) in enumerate(self.matrices, 1):
            same = number == len(self.matrices)  # rows of the last factor are alike
            count = operations.inverse(n) if same else operations.eigh(n)
            found.append(Work("cholesky" if same else "eigh", count, n, steps, "float32"))
            times = steps * (inner + 1.0) * (1 if same else 2)
            found.append(Work("product", operations.product(m, n, n), n, times, "float32"))
        found += self._iterations(steps * inner, curvature)
        return found

    def _iterations(self, times: float, curvature: float) -> list[Work]:
        """Products with the Gauss-Newton matrix, over a share of the windows."""
        some = self._scaled(curvature)
        weights = self.fitted
        found = [
            Work("elementwise", 4.0 * 14 * weights, 4.0 * weights, times),
            Work("call", 1.0, 1.0, times * 60),
        ]
        if self.attends:
            return [
                *found,
                *some.forward(2 * times),  # a central difference
                *self._gradient(times, curvature, BACK),
            ]
        elements = some.forward(times, attends=False)
        edge = elements[0].size
        return [
            *found,
            Work("product", 2 * DUAL * weights * some.tokens, edge, times, some.dtype),
            *(replace(one, times=3.0 * one.times) for one in elements[1:]),
        ]

    def _gradient(self, times: float, share: float, back: float) -> list[Work]:
        """A way forward and back."""
        some = self._scaled(share)
        forward = some.forward(times, attends=self.attends)
        edge = forward[0].size
        found = [
            *forward,
            Work("product", 2 * back * self.fitted * some.tokens, edge, times, some.dtype),
        ]
        for one in forward[1:]:
            factor = BACK_ATTENTION if one.kernel == "attention" else 1.0
            if one.kernel != "link":
                found.append(replace(one, times=factor * one.times))
        return found

    def _scaled(self, share: float) -> Passed:
        one = self.passed
        return replace(one, tokens=one.tokens * share, batches=max(1.0, one.batches * share))
