"""Numbers for people."""

from __future__ import annotations


def seconds_text(nanoseconds: float) -> str:
    """`1.62 s`, `20 ms`, `5.5 us`, `3 ns`: three digits, whatever the size."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(nanoseconds) >= size:
            return (
                f"{nanoseconds / size:.3g} {unit}" if nanoseconds < 1000 * size else f"{nanoseconds / size:.0f} {unit}"
            )
    return f"{nanoseconds:.3g} ns"


def bytes_text(size: float) -> str:
    """`1.5 GiB`, `20 MiB`, `512 bytes`: three digits, whatever the size."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= factor:
            return f"{size / factor:.3g} {unit}" if size < 1000 * factor else f"{size / factor:.0f} {unit}"
    return f"{size:.0f} bytes"
