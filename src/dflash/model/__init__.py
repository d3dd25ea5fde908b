"""The drafter and its geometry; importable in a notebook, with nothing of training behind it."""

from dflash.model.blocks import Blocks, make_blocks, slot_weights
from dflash.model.config import DFlashConfig
from dflash.model.drafter import DFlashDraftModel
from dflash.model.mask import attention_masks

__all__ = [
    "Blocks",
    "DFlashConfig",
    "DFlashDraftModel",
    "attention_masks",
    "make_blocks",
    "slot_weights",
]
