"""Programs, which hold the ordered instructions of every rank."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from threading import Lock
from typing import TypeVar

from lightning_pipes.ir.checks import ProgramError
from lightning_pipes.ir.instruction import RECOMPUTE_KINDS, Instruction, Kind, Span
from lightning_pipes.ir.plan import Plan

Row = tuple[Instruction, ...]
Rows = tuple[Row, ...]

_Made = TypeVar("_Made")
MAX_CACHED_INSTRUCTIONS = 2**19
"""The maximum number of instructions in all programs whose results a function caches, at some hundred bytes each."""
_INSTRUCTION_PATTERN = re.compile(
    r"(?:j(?P<job>\d+):)?(?P<kind>STEP|SF|RF|SB|RB|F|R|B|I|W)(?P<stage>\d+)(?:\.(?P<n>\d+))?(?:@(?P<batch>\d+))?"
)


@dataclass(frozen=True)
class Program:
    """The instructions of each rank, split into three parts with one row per rank.

    Each rank runs its row of `head`, then its row of `cycle` as often as further batches arrive, and finally its row of
    `tail`. A program for a finite window has only a head. In a program for an endless window, the head serves the first
    batches. Each further batch runs the cycle once, with batch numbers that increase by one. The tail finishes the
    batches that are still in flight.

    Attributes:
        head: the instructions that run first.
        cycle: the instructions that run once for each further batch. It is empty for a finite window.
        tail: the instructions that run at the end. It is empty for a finite window.

    Raises:
        ProgramError: if the parts have different numbers of rows.
    """

    head: Rows
    cycle: Rows = ()
    tail: Rows = ()

    def __post_init__(self) -> None:
        if not any(self.tail):
            object.__setattr__(self, "tail", ())
        for name, rows in (("cycle", self.cycle), ("tail", self.tail)):
            if rows and len(rows) != len(self.head):
                raise ProgramError(
                    f"the {name} has {len(rows)} rows, but the head has {len(self.head)}; both need one row for each "
                    "rank"
                )

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Rows]:  # without the hash, because other processes hash strings differently
        return {"head": self.head, "cycle": self.cycle, "tail": self.tail}

    @cached_property
    def _hash(self) -> int:  # cached because programs are looked up in every step and hold thousands of instructions
        return hash((self.head, self.cycle, self.tail))

    @property
    def n_ranks(self) -> int:
        """The number of ranks, which is the number of rows."""
        return len(self.head)

    @property
    def is_endless(self) -> bool:
        """Whether the program accepts any number of batches."""
        return bool(self.cycle)

    @cached_property
    def size(self) -> int:
        """The number of instructions in all parts."""
        return sum(map(len, (*self.head, *self.cycle, *self.tail)))

    @cached_property
    def head_batches(self) -> int:
        """The number of batches of each job that start in the head."""
        return max((i.batch + 1 for row in self.head for i in row if i.kind is Kind.F), default=0)

    def unroll(self, batches: int) -> Program:
        """Return the finite program that runs `batches` batches. A program without a cycle is returned unchanged."""
        if not self.is_endless:
            return self
        shift = max(0, batches - self.head_batches)  # surplus batches of the head are removed below
        rows = []
        for rank, head in enumerate(self.head):
            row = list(head)
            for turn in range(shift):
                row += shift_batches(self.cycle[rank], turn)
            row += shift_batches(self.tail[rank], shift) if self.tail else ()
            rows.append(tuple(i for i in row if 0 <= i.batch < batches))
        return Program(tuple(rows))

    def to_lines(self) -> list[str]:
        """Return the head as one line of text per rank.

        In this form, `F2.0` is the forward of the first span of its batch on stage 2. Spans are numbered among the
        spans of the same kind, stage, job and batch in the program. An R has the number of its backward.
        """
        number = self._span_numbers
        return [" ".join(self._format_token(i, number) for i in row) for row in self.head]

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {line}" for rank, line in enumerate(self.to_lines()))

    @cached_property
    def _span_numbers(self) -> dict[Instruction, int]:
        groups: dict[tuple[Kind, int, int, int], set[Span]] = {}
        for i in self.iter_instructions():
            groups.setdefault((i.kind, i.stage, i.job, i.batch), set()).add(i.span)
        for (kind, stage, job, batch), spans in groups.items():
            if kind is Kind.R:  # some micro-batches may have none
                spans.update(*(groups.get((other, stage, job, batch), ()) for other in RECOMPUTE_KINDS))
        return {
            Instruction(kind, stage, job, batch, span): n
            for (kind, stage, job, batch), spans in groups.items()
            for n, span in enumerate(sorted(spans))
        }

    @staticmethod
    def _format_token(i: Instruction, number: dict[Instruction, int]) -> str:
        job = f"j{i.job}:" if i.job else ""
        span = "" if i.kind is Kind.STEP else f".{number[i]}"
        batch = f"@{i.batch}" if i.batch else ""
        return f"{job}{i.kind}{i.stage}{span}{batch}"

    @classmethod
    def parse(cls, lines: Iterable[str], plan: Plan) -> Program:
        """Return the program that is described by lines in the format of `to_lines`.

        Args:
            lines: one line per rank.
            plan: the plan that defines the samples of each numbered span.

        Raises:
            ProgramError: if a token can't be read, or if it names a stage, job or span that the plan does not have.
        """
        return cls(tuple(tuple(_read_token(token, plan) for token in line.split()) for line in lines))

    def iter_instructions(self) -> Iterator[Instruction]:
        """Yield all instructions of the head, rank by rank."""
        for row in self.head:
            yield from row


def remember_results(most: int) -> Callable[[Callable[[Program, Plan], _Made]], Callable[[Program, Plan], _Made]]:
    """Return a decorator that caches the latest results of a function of a program and its plan.

    The cache holds at most `most` results, and fewer if the programs together have more than `MAX_CACHED_INSTRUCTIONS`
    instructions. It always keeps the latest result.
    """

    def add_memory(function: Callable[[Program, Plan], _Made]) -> Callable[[Program, Plan], _Made]:
        known: OrderedDict[tuple[Program, Plan], _Made] = OrderedDict()
        lock = Lock()

        @wraps(function)
        def recall_or_call(program: Program, plan: Plan) -> _Made:
            key = program, plan
            with lock:
                if key in known:
                    known.move_to_end(key)
                    return known[key]
            made = function(program, plan)
            with lock:
                known[key] = made
                size = sum(each.size for each, _ in known)
                while len(known) > 1 and (len(known) > most or size > MAX_CACHED_INSTRUCTIONS):
                    (oldest, _), _ = known.popitem(last=False)
                    size -= oldest.size
            return made

        return recall_or_call

    return add_memory


def shift_batches(row: Sequence[Instruction], batches: int) -> Row:
    """Return the instructions of `row` with batch numbers that are higher by `batches`."""
    return tuple(i._replace(batch=i.batch + batches) for i in row) if batches else tuple(row)


def _read_token(token: str, plan: Plan) -> Instruction:
    match = _INSTRUCTION_PATTERN.fullmatch(token)
    if match is None:
        raise ProgramError(f"can't read {token!r}; an instruction looks like F2.0, STEP1 or j1:B0.3@2")
    kind, stage, job = Kind(match["kind"]), int(match["stage"]), int(match["job"] or 0)
    batch = int(match["batch"] or 0)
    if kind is Kind.STEP:
        return Instruction(kind, stage, job, batch)
    try:
        return Instruction(kind, stage, job, batch, plan.spans(kind, stage, job)[int(match["n"])])
    except (IndexError, TypeError) as error:
        raise ProgramError(f"{token}: the plan has no such stage, job or span") from error
