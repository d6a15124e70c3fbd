"""Recovery: what a little training of a pruned model gives back, by distillation."""

from coec.recovery.recover import recover

__all__ = ["recover"]
