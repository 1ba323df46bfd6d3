"""Shaped links by definition, with a token bucket and exact fractions."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction

from lightning_pipes.cost import Link
from lightning_pipes.ir import Kind


def target(i, plan):
    """Return the rank that receives the send `i`."""
    return plan.ranks[i.stage + (1 if i.kind is Kind.SF else -1)]


class Wire:
    """A wire that moves one message at a time; a token is a nanosecond of the link's bandwidth."""

    def __init__(self):
        self.tokens = None  # the bucket is full
        self.free = 0

    def move(self, t, busy, link):
        """Return the start and the end of a message on the wire.

        The message is complete at `t` and takes `busy` at the link's bandwidth.
        """
        start = max(t, self.free)
        depth = round(link.burst / link.bandwidth * 1e9)
        quick = 0 if link.peak_ratio == 0 else round(busy * link.peak_ratio)
        tokens = Fraction(depth if self.tokens is None else min(depth, self.tokens + start - self.free))
        if quick == 0:  # without a peak, the tokens are spent immediately
            out = start + max(0, busy - tokens)
            tokens -= min(tokens, busy)
        elif quick == busy:  # the rate of tokens equals the peak
            out = start + busy
        else:
            speed = Fraction(busy, quick)  # bytes per token
            lasts = tokens / (speed - 1)
            if lasts >= quick:
                out = start + quick
                tokens -= (speed - 1) * quick
            else:
                out = start + lasts + (busy - speed * lasts)
                tokens = Fraction(0)
        self.tokens, self.free = tokens, out
        assert out == int(out)
        return start, int(out)


class Links:
    def __init__(self, plan, costs):
        self.plan, self.costs = plan, costs
        self.wires = {}
        self.arrivals = {}

    def send(self, t, i):
        """Return the start, the last byte out and the arrival of the send `i`, which is complete at `t`.

        Sends must be passed in their order.
        """
        pair = self.plan.ranks[i.stage], target(i, self.plan)
        link = self.costs.link_between(*pair)
        busy, latency = self.costs.transfer_ns(i, self.plan)
        arrivals = self.arrivals.setdefault(pair, [])
        if link.max_in_flight and len(arrivals) >= link.max_in_flight:
            t = max(t, arrivals[-link.max_in_flight] + latency)  # posted again, and the sender is notified
        start, out = self.wires.setdefault(link.wire or pair, Wire()).move(t, busy, link)
        arrivals.append(out + latency)
        return start, out, out + latency


def shaped(costs, plan, seed, *, crowded=False):
    """Return `costs` with links of every shape; with `crowded`, some links of different ranks share a wire."""
    rng = random.Random(seed)

    def link(source):
        bandwidth = 1e9  # a byte is a nanosecond and a token
        return Link(
            bandwidth,
            latency=rng.choice([0, 1, 7, 20]) * 1e-9,
            burst=rng.choice([0, 5, 30]),
            peak=bandwidth * rng.choice([1, 1.5, 2, 4, math.inf]),
            max_in_flight=rng.randrange(4),
            wire=rng.choice(["", "a", "b"]) if crowded else rng.choice(["", f"card {source}"]),
        )

    ranks = range(plan.n_ranks)
    links = {(a, b): link(a) for a in ranks for b in ranks if a != b}
    joined = {(a, b) for a, b, _ in plan.directed_links}
    return replace(costs, links={pair: links[pair] for pair in links if pair in joined})


def sending(costs, blocking):
    """Return `costs` with sends that block or do not block."""
    return replace(costs, regime="blocking" if blocking else "asynchronous")
