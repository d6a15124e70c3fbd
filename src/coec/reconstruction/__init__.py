"""Reconstruction: a block trained towards given outputs (METHODS §8)."""

from coec.reconstruction.block_training import (
    Example,
    Objective,
    TrainedBlock,
    Training,
    relative_error,
    train_block,
)

__all__ = ["Example", "Objective", "TrainedBlock", "Training", "relative_error", "train_block"]
