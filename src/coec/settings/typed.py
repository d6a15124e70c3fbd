"""Settings as keyword arguments, for editors and type checkers.

Written by `python tools/tables.py typed`.
"""

from typing import Any, Literal, TypedDict


class PruningSettings(TypedDict, total=False):
    """Settings of a pruning, of its text and of the machine."""

    sparsity: float
    attention_units: Literal["groups", "heads", "auto"]
    attention_sparsity: float | None
    mlp_sparsity: float | None
    drop_blocks: int
    expert_sparsity: float
    budget_parameters: float | None
    budget_memory: str | None
    context: int
    multiple_of: int | str
    tensor_parallel: int
    allocation: Literal["uniform", "adaptive", "error"]
    non_uniform: bool
    selection: Any
    kept: Any
    compensation: Any
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None
    target: Literal["hf", "vllm", "llama.cpp"]
    solve_dtype: Literal["auto", "float64", "float32"]
    preset: Literal["paper", "fast", "balanced", "best"]
    propagate: bool
    reconstruct: int
    reconstruct_rate: float
    prediction_passes: int
    token_weights: Literal["equal", "residual"]
    kv_groups: Literal["uniform", "all", "held-out"]
    calibration: Any
    text_column: str
    samples: int
    seq_len: int | None
    seed: int
    holdout: float
    guard: bool
    bos: Literal["auto", "on", "off"]
    forward_dtype: Literal["float64", "float32", "bfloat16", "float16"] | None
    device: str
    executor: Literal["here", "ray"]
    address: str | None
    workers: int | None
    alpha: float
    rotation: Literal["two-sided", "left", "right"]
    parameterization: Literal["stiefel", "full"]
    rescale: Literal["gcv", "fixed"]
    kappa: float
    solver: Literal["joint", "gradient"]
    lambda_a: float
    r_p: int
    ridge: float | Literal["auto"]
    options: dict[str, Any]
    trust_remote_code: bool
