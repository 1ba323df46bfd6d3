"""Programs of regular plans, where all stages, directions and links cut a batch in the same way."""

from lightning_pipes.ir.regular.walk import IrregularError, Unit, is_regular, walk_program

__all__ = ["IrregularError", "Unit", "is_regular", "walk_program"]
