"""Rotation of singular frames by pruning and compensation (paper, Geometric Measurements).

O is the dense weight's leading right frame restricted to the kept columns, P that of the slice
`W₀[:, K]`, C that of the compensated weight.
"""

import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

RANKS = {"attention": 16, "mlp": 64}
"""Number of leading directions of a frame, as in the paper."""
CONSUMERS = {"attention": "self_attn.o_proj.weight", "mlp": "mlp.down_proj.weight"}


class Weights:
    """The tensors of a model folder, read one at a time, in float64."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
            self.files = {name: folder / file for name, file in names}
        else:
            with safe_open(folder / "model.safetensors", "pt") as file:
                self.files = dict.fromkeys(file.keys(), folder / "model.safetensors")

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.files[name], "pt") as file:
            return file.get_tensor(name).double()


def frames(dense: Path, pruned: Path) -> list[dict[str, Any]]:
    """Measure every pruned `o_proj` and `down_proj`; one row per module.

    Args:
        dense: folder of a model whose blocks are named as Llama's and Qwen's.
        pruned: folder that `coec.prune` wrote; KV groups and channels were removed.
    """
    config, before, after = AutoConfig.from_pretrained(dense), Weights(dense), Weights(pruned)
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    rows = []
    for key, units in load_file(pruned / "coec/kept.safetensors").items():
        _, block, site = key.split(".")
        prefix, value = f"model.layers.{block}.", None
        if site == "attention":
            # A group's query heads, each of which reads its values, are columns side by side.
            V = before[f"{prefix}self_attn.v_proj.weight"].unflatten(0, (groups, size))[units]
            value = V.repeat_interleave(heads // groups, dim=0).flatten(0, 1)
            columns = torch.arange(heads * size).unflatten(0, (groups, -1))[units].flatten()
        else:
            columns = units
        W0, W = (weights[prefix + CONSUMERS[site]] for weights in (before, after))
        if len(columns) < W0.shape[1]:
            measured = compare(W0, columns, W, RANKS[site], value)
            rows.append({"site": site, "block": int(block), **measured})
    return rows


def compare(
    W0: Float[Tensor, "m d"],
    kept: Int[Tensor, " k"],
    W: Float[Tensor, "m k"],
    r: int,
    value: Float[Tensor, "k h"] | None = None,
) -> dict[str, float | None]:
    """Compare the frames O, P and C of one weight; angles are means over the principal angles.

    Args:
        W0: the dense weight.
        kept: its columns that are kept.
        W: the compensated weight.
        r: number of leading directions; fewer if a weight has a lower rank.
        value: the pruned value projection as the columns read it, for the alignment penalty.

    Returns:
        Mean angles in degrees; `discrepancy = ‖Q_u − Q_v‖_F / ‖Q_u‖_F` with `Q_u = U_Pᵀ U_C` and
        `Q_v = V_Pᵀ V_C`; `gap = σ_r / σ_(r+1)` of the slice; the penalty
        `𝒜 = ‖U_vᵀ (Π_r(V) − Π_anchor) U_v‖_F² / r²` of the slice and of the compensated weight.
    """
    (_, _, V0), (Up, sp, Vp), (Uc, _, Vc) = parts = [_svd(A) for A in (W0, W0[:, kept], W)]
    r = min(r, *(len(s) for _, s, _ in parts))
    original = torch.linalg.qr(V0[kept, :r]).Q
    P, C = Vp[:, :r], Vc[:, :r]
    Q_u, Q_v = Up[:, :r].T @ Uc[:, :r], P.T @ C
    found: dict[str, float | None] = {
        "angle_op": _angle(original, P),
        "angle_oc": _angle(original, C),
        "angle_pc": _angle(P, C),
        "discrepancy": float((Q_u - Q_v).norm() / Q_u.norm()),
        "gap": float(sp[r - 1] / sp[r]) if r < len(sp) else None,
    }
    if value is not None:
        U_v = _svd(value)[0][:, :r]
        for name, V in {"penalty_pruned": P, "penalty_compensated": C}.items():
            seen, anchor = V.T @ U_v, original.T @ U_v
            found[name] = float((seen.T @ seen - anchor.T @ anchor).square().sum()) / r**2
    return found


def _svd(A: Float[Tensor, "m k"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, s and V of the singular values above rounding."""
    U, s, Vt = torch.linalg.svd(A, full_matrices=False)
    rank = int((s > s[0] * max(A.shape) * torch.finfo(s.dtype).eps).sum())
    return U[:, :rank], s[:rank], Vt[:rank].T


def _angle(A: Float[Tensor, "k r"], B: Float[Tensor, "k r"]) -> float:
    """Return the mean principal angle; sines too, since cosines lose small angles."""
    inner = A.T @ B
    cosines, sines = torch.linalg.svdvals(inner), torch.linalg.svdvals(B - A @ inner).flip(0)
    return float(torch.rad2deg(torch.atan2(sines, cosines)).mean())
