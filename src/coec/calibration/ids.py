"""Token ids given by a caller, as int64 tensors."""

import numpy as np
import torch
from torch import Tensor

from coec.errors import CalibrationError


def token_ids(ids: Tensor | np.ndarray) -> Tensor:
    """Convert an array or tensor of whole numbers to int64 on the CPU.

    Raises:
        CalibrationError: it holds fractions, truth values or nothing, or is neither one row of ids
            nor several of one length.
    """
    if isinstance(ids, np.ndarray):
        if ids.dtype.kind not in "iu":
            raise CalibrationError(f"token ids are whole numbers, got {ids.dtype}")
        ids = torch.from_numpy(ids.astype(np.int64, casting="same_kind"))
    elif ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise CalibrationError(f"token ids are whole numbers, got {ids.dtype}")
    if ids.ndim not in (1, 2) or ids.numel() == 0:
        raise CalibrationError(
            f"token ids are integer values of shape (n,) or (rows, length), got {tuple(ids.shape)}"
        )
    return ids.long().cpu()
