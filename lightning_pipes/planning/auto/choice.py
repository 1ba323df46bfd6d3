"""Ways to train side by side, and the fastest of them: a table that says why."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass

from lightning_pipes.ir import Kind, Plan, Policy, Schedule
from lightning_pipes.planning.fit import Fit


@dataclass(frozen=True)
class Option:
    """One way to train: a schedule with its settings, micro-batches, recomputation.

    Attributes:
        microbatches: their number.
        recompute: whether stages keep only their input.
        plan: None where it can't be made.
        bound: seconds of a step that it can't beat, whatever the partition.
        fit: its best partition and what comes of it; None where it can't be had, or can't win.
        why_not: what kept it out.
        too_large: whether it might win, and would take too long to simulate.
    """

    schedule: Schedule | Policy
    microbatches: int
    recompute: bool
    plan: Plan | None
    bound: float = 0.0
    fit: Fit | None = None
    why_not: str = ""
    too_large: bool = False

    @classmethod
    def from_plan(
        cls, schedule: Schedule | Policy, plan: Plan, bound: float, why_not: str = "", too_large: bool = False
    ) -> Option:
        """Return the option of a plan, before anything is simulated."""
        microbatches = len(plan.spans(Kind.F, 0))
        return cls(schedule, microbatches, any(plan.recompute), plan, bound, why_not=why_not, too_large=too_large)

    @property
    def n_forwards(self) -> int:
        """The forwards of a batch on all stages; 0 without a plan."""
        return 0 if self.plan is None else self.microbatches * self.plan.n_stages

    @property
    def label(self) -> str:
        """The schedule with its settings, such as "kfkb k=2"; without those that are empty."""
        chosen: dict[str, object] = vars(self.schedule) if is_dataclass(self.schedule) else {}
        told = [f"{name}={value}" for name, value in chosen.items() if value not in (None, ())]
        return " ".join([self.schedule.name, *told])


@dataclass(frozen=True)
class Choice:
    """The fastest option, and all that were looked at, the fastest first.

    Attributes:
        not_searched: sentences on what might be faster and was not simulated, and how to have it simulated.
    """

    best: Option
    options: tuple[Option, ...]
    not_searched: tuple[str, ...] = ()

    @property
    def fit(self) -> Fit:
        """The best option's partition and step time."""
        assert self.best.fit is not None
        return self.best.fit

    def rows(self, most: int = 12) -> list[dict[str, str | int | float]]:
        """The table as data: the best `most` options that were simulated, then those that were not."""
        found: list[dict[str, str | int | float]] = []
        for option in self.options[:most]:
            row: dict[str, str | int | float] = {
                "schedule": option.label,
                "microbatches": option.microbatches,
                "recompute": "yes" if option.recompute else "no",
            }
            if option.fit is not None:
                row["step_ms"] = round(1e3 * option.fit.seconds, 3)
                row["peak_mib"] = round(max(option.fit.peak_bytes) / 2**20, 1)
                row["slower"] = f"{option.fit.seconds / self.fit.seconds - 1:.1%}"
            else:
                row["why_not"] = option.why_not
            found.append(row)
        return found

    def __str__(self) -> str:
        lines = [f"{'schedule':28} {'micro-batches':>13} {'recompute':>9} {'step':>10} {'peak memory':>12}"]
        for row in self.rows():
            start = f"{row['schedule']:28} {row['microbatches']:13} {row['recompute']:>9}"
            if "why_not" in row:
                lines.append(f"{start} {row['why_not']}")
            else:
                slower = "the best" if row["slower"] == "0.0%" else f"+{row['slower']}"
                lines.append(f"{start} {row['step_ms']:7.1f} ms {row['peak_mib']:8.1f} MiB  {slower}")
        left = len(self.options) - len(self.rows())
        return "\n".join([*lines, f"and {left} more" if left else "", *self.not_searched]).rstrip()
