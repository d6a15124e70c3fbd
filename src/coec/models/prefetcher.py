"""Read the weights of the next block while the current one is computed."""

from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from coec.models.dense import Dense
from coec.models.layout import BlockLayout


class Prefetcher:
    """Reads the blocks of a model in order, each while the block before it is computed.

    The context manager waits for its thread. At most two blocks are in memory.

    Args:
        dense: the model.
        last: index of the last block to read.
    """

    def __init__(self, dense: Dense, last: int) -> None:
        self._dense, self._last = dense, last
        self._thread = ThreadPoolExecutor(1)
        self._next: tuple[int, Future[dict[str, Tensor]]] | None = None

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def tensors(self, block: BlockLayout) -> dict[str, Tensor]:
        """Read a block like `Dense.tensors`, and begin to read the block after it."""
        index, future = self._next or (-1, None)
        read = future.result() if future and index == block.index else self._dense.tensors(block)
        self._next = None
        if block.index < self._last:
            following = self._dense.layout.blocks[block.index + 1]
            self._next = (following.index, self._thread.submit(self._dense.tensors, following))
        return read
