"""The work of a pipeline as data: plans, instructions, programs, and what they owe each other.

Standard library only. Everything here is frozen; state lives in the engine and in the simulator.
"""

from lightning_pipes.ir.checks import check_count, check_fields, check_number, check_type, shown
from lightning_pipes.ir.deadlock import deadlock, grid
from lightning_pipes.ir.dependencies import DependencyTracker, needs
from lightning_pipes.ir.errors import DeadlockError, InputError, PipelineError, PlanError, ProgramError
from lightning_pipes.ir.instruction import (
    COMPUTE,
    RECEIVES,
    RECOMPUTES,
    SENDS,
    STEP,
    B,
    F,
    I,
    Instruction,
    Kind,
    W,
    receive_of,
    send_of,
)
from lightning_pipes.ir.lowering import lower, window
from lightning_pipes.ir.passes import Alike, Joined, Pass, alike, graphs, joined, passes, sorts
from lightning_pipes.ir.plan import MOST_FORWARDS, MOST_MICROBATCHES, MOST_STAGES, Cut, Plan
from lightning_pipes.ir.program import Program
from lightning_pipes.ir.rule import Rule, RulePolicy, has_room, offered
from lightning_pipes.ir.schedule import (
    Policy,
    RankView,
    Schedule,
    Traits,
    check_one_batch,
    check_one_stage_a_rank,
    check_placement,
    check_stream,
    prepared,
    ready_key,
)
from lightning_pipes.ir.span import Span, even_spans
from lightning_pipes.ir.stream import Delayed, Ledger, Stepped, Transfer, Use, Waits, unrolled
from lightning_pipes.ir.verify import Facts, verify

__all__ = [
    "COMPUTE",
    "MOST_MICROBATCHES",
    "MOST_FORWARDS",
    "MOST_STAGES",
    "RECEIVES",
    "RECOMPUTES",
    "SENDS",
    "STEP",
    "Alike",
    "B",
    "Cut",
    "DeadlockError",
    "Delayed",
    "DependencyTracker",
    "F",
    "Facts",
    "I",
    "InputError",
    "Instruction",
    "Joined",
    "Kind",
    "Ledger",
    "Pass",
    "PipelineError",
    "Plan",
    "PlanError",
    "Policy",
    "Program",
    "ProgramError",
    "RankView",
    "Rule",
    "RulePolicy",
    "Schedule",
    "Span",
    "Stepped",
    "Traits",
    "Transfer",
    "Use",
    "W",
    "Waits",
    "alike",
    "check_count",
    "check_fields",
    "check_number",
    "check_one_batch",
    "check_one_stage_a_rank",
    "check_placement",
    "check_stream",
    "check_type",
    "deadlock",
    "grid",
    "even_spans",
    "graphs",
    "has_room",
    "joined",
    "lower",
    "needs",
    "offered",
    "passes",
    "prepared",
    "ready_key",
    "receive_of",
    "send_of",
    "shown",
    "sorts",
    "unrolled",
    "verify",
    "window",
]
