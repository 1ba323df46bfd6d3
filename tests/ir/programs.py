"""Programs for the tests of several layers."""

from lightning_pipes.ir import STEP, B, F, Kind, Program, Span

ONE = Span(0, 1)


def pipedream():
    """Return asynchronous 1F1B on two ranks with one micro-batch per batch.

    The first rank is one batch ahead.
    """

    def f(stage, batch):
        return F(stage, ONE, batch=batch)

    def b_step(stage, batch):
        return B(stage, ONE, batch=batch), STEP(stage, batch=batch)

    return Program(
        head=((f(0, 0), f(0, 1)), (f(1, 0), *b_step(1, 0))),
        cycle=((*b_step(0, 0), f(0, 2)), (f(1, 1), *b_step(1, 1))),
        tail=((*b_step(0, 0), *b_step(0, 1)), (f(1, 1), *b_step(1, 1))),
    )


def split(program):
    """Return the same order with I instead of B, and with all W before STEP."""
    rows = []
    for row in program.head:
        early = [i._replace(kind=Kind.I) if i.kind is Kind.B else i for i in row if i.kind is not Kind.STEP]
        late = [i._replace(kind=Kind.W) for i in row if i.kind is Kind.B]
        rows.append((*early, *late, *(i for i in row if i.kind is Kind.STEP)))
    return Program(tuple(rows))


def samples(instructions):
    return {(i.kind, i.stage, n) for i in instructions for n in range(i.span.start, i.span.stop)}
