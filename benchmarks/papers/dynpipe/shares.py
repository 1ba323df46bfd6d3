"""Uneven shares of a batch for replicas of a stage that are not equally fast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from lightning_pipes.ir import InputError, check_count, shown


def row_shares(rows: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """How many of `rows` samples each replica gets, in proportion to how many it takes in a second (DynPipe, S V-B1):
    rounded down, and the rest to those with the largest remainders. Gradients are then weighted by rows.

    This is planned only: Lightning's samplers give every replica as many.

    Args:
        seconds: of a sample on each replica.

    Raises:
        InputError: no replicas, or seconds that are not above 0.
    """
    check_count("rows", rows)
    if not seconds or not all(0 < each < math.inf for each in seconds):
        raise InputError(f"shares need the seconds of a sample on each replica, above 0, got {shown(seconds)}")
    rates = [1 / Fraction(each) for each in seconds]  # exact, so that rows always add up
    exact = [rows * rate / sum(rates) for rate in rates]
    shares = [int(each) for each in exact]
    order = sorted(range(len(exact)), key=lambda n: (shares[n] - exact[n], n))
    for n in order[: rows - sum(shares)]:
        shares[n] += 1
    return tuple(shares)
