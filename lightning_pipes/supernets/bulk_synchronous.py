"""Bulk-synchronous training of subnets, for comparison with systems that flush between bulks."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_pipes.ir import Delayed, InputError, check_count, check_type, short_repr


def bulk_synchronous(layers: Mapping[str, bool | Delayed], number: int, bulk: int) -> dict[str, bool | Delayed]:
    """Return the layers of subnet `number`, read at the start of its bulk. This is GPipe's bulk-synchronous order over
    subnets (NASPipe, Zhao et al. 2022, S2.2, BSP). Updates come in the order of subnets, at the next bulk's start all
    of them are there.

    The result depends on `bulk`, which such systems take from the number of stages, and is another one than that of
    subnets one after another.

    Args:
        layers: the result of `Supernet.layers_of`.
        bulk: how many subnets.

    Raises:
        InputError: these are no layers, or a number makes no sense.
    """
    check_type("layers", layers, Mapping[str, bool | Delayed])
    if check_type("number", number, int) < 0:
        raise InputError(f"number must be at least 0, got {short_repr(number)}; subnets are counted from 0")
    late = Delayed(number % check_count("bulk", bulk, "; subnets between two flushes") + 1)
    return {name: late if stepped else False for name, stepped in layers.items()}
