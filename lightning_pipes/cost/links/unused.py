"""Warnings about settings of links that no message of a plan uses."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from lightning_pipes.cost.links.link import Link
from lightning_pipes.ir import Kind, Plan


def unused_link_warnings(
    plan: Plan, links: Mapping[tuple[int, int], Link], link: Link, sized: Collection[Kind]
) -> Iterator[str]:
    """Yield a warning about links between ranks that are no neighbours, and one about a bandwidth for messages without
    bytes.

    Args:
        links: exceptions from `link`, by (from rank, to rank).
        sized: the sends, SF or SB, whose bytes or seconds are known.
    """
    joined = {(a, b) for a, b, _ in plan.directed_links}
    unused = sorted(pair for pair in links if pair not in joined)
    if unused:
        there = _short_list(sorted(joined)) or "none, as all stages are on one rank"
        yield (
            f"links has {_short_list(unused)}, over which no message of this plan goes: neighbouring stages are on the "
            f"ranks {there}. Such a link changes nothing; name the ranks of neighbours, or leave it out"
        )
    for a, b, kind in plan.directed_links:
        bandwidth = links.get((a, b), link).bandwidth
        if kind not in sized and bandwidth < math.inf:
            name = "forward_bytes" if kind is Kind.SF else "backward_bytes"
            yield (
                f"the link from rank {a} to rank {b} has a bandwidth of {bandwidth:g} bytes a second and messages have "
                f"no bytes, so they take no time on it; give {name}, or seconds of {kind}, or message_bytes where "
                "CostModel.uniform makes the model"
            )
            return  # one warning is enough for all links


def _short_list(pairs: list[tuple[int, int]]) -> str:
    return ", ".join(map(str, pairs[:6])) + (", ..." if pairs[6:] else "")
