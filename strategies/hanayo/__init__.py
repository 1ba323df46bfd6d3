"""Hanayo: stages placed in waves over the ranks."""

from lightning_pipes.strategies.hanayo.schedule import Hanayo

__all__ = ["Hanayo"]
