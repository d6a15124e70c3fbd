"""What running a model over windows takes: blocks, statistics, the head, writing text."""

from dataclasses import dataclass

from coec.planning import operations
from coec.planning.machines import Work

ELEMENTS = (36.0, 8.0)
"""Elements that move through memory in a block beside its products, and as their results, per
token: times the hidden width, and times that of the MLP. Counted in Llama."""
CALLS, CALLS_OF_GRAM = 110.0, 25.0
"""Of operators, in a block and for the statistics of a site, per batch: 70 that torch runs, and
what lies around them in modules."""
CALLS_OF_TOKEN = (200.0, 900.0)
"""In a block and beside the blocks, where the model writes a token: `generate` looks after a cache
and the end of every text."""


@dataclass(frozen=True)
class Passed:
    """One run of a block over windows.

    Attributes:
        weights: parameters of all its matrices, of those that a token meets.
        hidden: its width.
        ffn: the width of its MLP, of all experts that a token meets.
        attention: columns of its attention's output.
        tokens: of all windows together.
        length: of a window.
        batches: in how many parts they are run.
        dtype: of the pass.
        device: cpu or cuda; from the host to another one hidden states are copied, and back.
        head: columns of one of its heads.
    """

    weights: float
    hidden: int
    ffn: int
    attention: int
    tokens: float
    length: int
    batches: float
    dtype: str
    device: str
    head: int

    def forward(self, times: float = 1.0, *, attends: bool = True) -> list[Work]:
        """A way forward, so many times.

        Args:
            times: how often.
            attends: whether attention maps are computed.
        """
        edge = (self.tokens / self.batches * self.hidden * min(self.hidden, self.ffn or 1e9)) ** (
            1 / 3
        )
        itemsize = 4 if self.dtype == "float32" else 8 if self.dtype == "float64" else 2
        elements = ELEMENTS[0] * self.hidden + ELEMENTS[1] * self.ffn
        tensor = self.tokens / self.batches * max(self.hidden, self.ffn) * itemsize
        found = [
            Work("product", 2 * self.weights * self.tokens, edge, times, self.dtype),
            Work("elementwise", elements * self.tokens * itemsize, tensor, times),
            Work("call", 1.0, 1.0, times * CALLS * self.batches),
        ]
        if attends:
            maps = 4.0 * self.length * self.attention * self.tokens
            found.append(Work("attention", maps, float(self.head), times, self.dtype))
        if self.device != "cpu":
            moved = 2 * self.tokens * self.hidden * itemsize
            found.append(Work("link", moved, 1.0, times))
        return found


def statistics(columns: int, tokens: float, batches: float, times: float = 1.0) -> list[Work]:
    """Statistics of one site: a product in float32, and sums in float64."""
    batch = 4.0 * columns * tokens / batches
    square = 8.0 * columns**2
    return [
        Work("product", 2.0 * columns**2 * tokens, (columns**2 * tokens / batches) ** (1 / 3),
             times, "float32"),
        Work("reduce", 4.0 * columns * tokens, batch, 3 * times),
        Work("elementwise", 4.0 * 5 * columns * tokens, batch, times),
        Work("elementwise", 2.5 * square, square, times * batches),
        Work("call", 1.0, 1.0, times * CALLS_OF_GRAM * batches),
    ]  # fmt: skip


def head(hidden: int, vocabulary: int, tokens: float, dtype: str, models: float) -> list[Work]:
    """Scores of so many models beside the dense one, whose logits each time are made again."""
    logits = vocabulary * tokens
    return [
        Work("product", operations.product(1, hidden, vocabulary) * tokens, hidden, 2 * models,
             dtype),
        Work("elementwise", 4.0 * 22 * logits, 2.0**26, models),
        Work("call", 1.0, 1.0, models * 90 * max(1.0, logits / 2**24)),
    ]  # fmt: skip


@dataclass(frozen=True)
class Written:
    """Windows that the model itself writes, so many tokens at a time, one after the other."""

    weights: float
    hidden: int
    layers: int
    windows: int
    length: int
    batch: int
    dtype: str

    def work(self) -> list[Work]:
        """Every token is a pass of its own: through few rows, bound by reading all weights."""
        batches = -(-self.windows // self.batch)
        steps = batches * float(self.length)
        rows = min(self.batch, self.windows)
        itemsize = 4 if self.dtype == "float32" else 2
        cache = 2.0 * self.length / 2 * self.hidden * rows * itemsize * self.layers
        return [
            Work("product", 2 * self.weights * rows, (rows * self.hidden**2) ** (1 / 3), steps,
                 self.dtype),
            Work("elementwise", self.weights * itemsize + 3 * cache, 2.0**20, steps),
            Work("call", 1.0, 1.0, steps * (self.layers * CALLS_OF_TOKEN[0] + CALLS_OF_TOKEN[1])),
        ]  # fmt: skip
