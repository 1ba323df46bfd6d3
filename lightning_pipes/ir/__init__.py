"""The work of a pipeline as data: plans, instructions, programs and their dependencies.

Standard library only. Everything here is frozen; state lives in the engine and in the simulator.
"""

from lightning_pipes.ir.checks import check_count, check_fields, check_number, check_type, short_repr
from lightning_pipes.ir.deadlock import deadlock_error, draw_grid
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
    target_stage,
)
from lightning_pipes.ir.lowering import batch_instructions, lower
from lightning_pipes.ir.passes import (
    Concat,
    CostKey,
    Pass,
    cost_classes,
    cost_key,
    count_concatenated,
    graph_spans,
    layer_passes,
)
from lightning_pipes.ir.plan import MAX_FORWARDS, MAX_MICROBATCHES, MAX_STAGES, Cut, Plan
from lightning_pipes.ir.program import Program
from lightning_pipes.ir.rule import Rule, RulePolicy, eligible_instructions, has_room
from lightning_pipes.ir.schedule import (
    Policy,
    RankView,
    Schedule,
    Traits,
    adapt_plan,
    check_one_batch,
    check_one_stage_a_rank,
    check_placement,
    check_stream,
    ready_key,
)
from lightning_pipes.ir.span import Span, even_spans
from lightning_pipes.ir.stream import Delayed, LayerUse, LayerVersion, Ledger, Transfer, Waits, unroll_stream
from lightning_pipes.ir.verify import ProgramStats, verify

__all__ = [
    "COMPUTE",
    "MAX_MICROBATCHES",
    "MAX_FORWARDS",
    "MAX_STAGES",
    "RECEIVES",
    "RECOMPUTES",
    "SENDS",
    "STEP",
    "CostKey",
    "B",
    "Cut",
    "DeadlockError",
    "Delayed",
    "DependencyTracker",
    "F",
    "ProgramStats",
    "I",
    "InputError",
    "Instruction",
    "Concat",
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
    "LayerVersion",
    "Traits",
    "Transfer",
    "LayerUse",
    "W",
    "Waits",
    "cost_key",
    "check_count",
    "check_fields",
    "check_number",
    "check_one_batch",
    "check_one_stage_a_rank",
    "check_placement",
    "check_stream",
    "check_type",
    "deadlock_error",
    "draw_grid",
    "even_spans",
    "graph_spans",
    "has_room",
    "count_concatenated",
    "lower",
    "needs",
    "eligible_instructions",
    "layer_passes",
    "adapt_plan",
    "ready_key",
    "receive_of",
    "send_of",
    "short_repr",
    "target_stage",
    "cost_classes",
    "unroll_stream",
    "verify",
    "batch_instructions",
]
