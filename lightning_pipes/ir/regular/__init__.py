"""Programs of regular plans: those whose stages, directions and links cut a batch alike."""

from lightning_pipes.ir.regular.walk import IrregularError, Unit, is_regular, walk_program

__all__ = ["IrregularError", "Unit", "is_regular", "walk_program"]
