"""Check the arguments of simulations."""

from __future__ import annotations

from lightning_pipes.ir import Plan, Policy, Program, Schedule, short_repr

Kinds = type[Program] | type[Policy]


def check_order(who: str, order: object, plan: object, *kinds: Kinds) -> None:
    """Refuse arguments that are no order or no plan; a schedule makes programs and is no order.

    Args:
        who: the function that was called.
        kinds: what it takes; by default programs and policies.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(order, kinds or (Program, Policy)):
        wanted = " or ".join(f"a {kind.__name__}" for kind in kinds or (Program, Policy))
        way_out = (
            f"the one of {order.name!r} is schedule.program(plan)"
            if isinstance(order, Schedule)
            else ("a schedule's program is schedule.program(plan)")
        )
        raise TypeError(f"{who} takes {wanted}, got {short_repr(order)}; {way_out}")
    if not isinstance(plan, Plan):
        raise TypeError(f"{who} needs the Plan that was ordered as second, got {short_repr(plan)}")
