"""PipeDream's order, and layers that move while training goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from lightning_pipes.cost import Cluster, ModelProfile
from lightning_pipes.cost.units import parse_bytes, parse_setting
from lightning_pipes.ir import InputError, check_count, check_number, check_type
from lightning_pipes.planning.replanning import HostedStage, Interference
from lightning_pipes.planning.staleness import Constants, Iterations
from lightning_pipes.strategies.dynpipe.choosing import StageChoice, choose_stages
from lightning_pipes.strategies.dynpipe.interference.dataset import Dataset, cross_validated
from lightning_pipes.strategies.dynpipe.interference.predictor import CorrectedFormula, Formula, Predictor
from lightning_pipes.strategies.dynpipe.meshes import Pricing
from lightning_pipes.strategies.dynpipe.planner import DynPlanner, MemoryGuard
from lightning_pipes.strategies.dynpipe.repartition import Search
from lightning_pipes.strategies.pipedream import PipeDream


@dataclass(frozen=True)
class DynPipe(PipeDream):
    """Asynchronous 1F1B with weight stashing that re-partitions itself (DynPipe): the order and the weight versions of
    `pipedream` (S IV-B1), and a planner that looks at every operation's time and has layers move to other stages, away
    from devices that a neighbour slows down (S V).

    Attributes:
        every: training batches from one look to the next. The paper's code looks every 50 and acts 60 batches later;
            looking more often costs little here, and what is seen counts at once.
        windows: looks in a row that have to want a move.
        gain: the share of a step that a move must save at least. The paper's text has no threshold; its code waits for
            a stage that takes twice as long as another.
        horizon: batches for which it is counted on that all stays as it is, when a move is weighed.
        top_k: blocks of the condensed model between which it may be cut, S V-B1; None takes as many as can be gone
            through.
        incremental: layers only move to a neighbouring stage.
        predictor: of interference, S V-A, or the path of a forest (`interference.Predictor.load`); None plans with
            measured times alone ("w/o RF").
        low_memory: bytes, such as "2GiB", of which more has to be free on each device before every batch. Else batches
            stop overlapping until that is so again, and if it stays so layers leave the device (S V-B2). None for no
            such mark. An InterferenceMonitor has to see it.
        memory_drop: the share of the free memory that may go within `every` batches, or batches stop overlapping; None
            for any.
        predict: as with `pipedream`.
    """

    every: int = 10
    windows: int = 2
    gain: float = 0.05
    horizon: int = 1000
    top_k: int | None = None
    incremental: bool = False
    predictor: str | Interference | None = field(default=None, compare=False)
    low_memory: int | str | None = None
    memory_drop: float | None = None
    name: ClassVar[str] = "dynpipe"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("every", "windows", "horizon"):
            check_count(f"{self.name}: {name}", getattr(self, name))
        check_number(f"{self.name}: gain", self.gain, "a share of a step, 0 to 1", lambda x: 0 <= x < 1)
        check_type(f"{self.name}: top_k", self.top_k, int | None)
        if self.top_k is not None:
            check_count(f"{self.name}: top_k", self.top_k)
        if self.low_memory is not None:
            parse_setting(f"{self.name}: low_memory", parse_bytes, self.low_memory)
        if self.memory_drop is not None:
            check_number(f"{self.name}: memory_drop", self.memory_drop, "a share, 0 to 1", lambda x: 0 < x < 1)

    # Drawn by `step(DynPipe(), microbatches=1, batches=5)`:
    # rank 0 |0-1-2-........0===3-1===4-2===..3===..4===| bubble 28.6%
    # rank 1 |..0-1-....0===2-1===3-2===4-3===..4===....| bubble 28.6%
    # rank 2 |....0-0===1-1===2-2===3-3===4-4===........| bubble 28.6%
    #         - forward  = backward  . idle
    def make_planner(self) -> DynPlanner:
        search = Search(self.top_k, self.incremental)
        predictor = _loaded(self.predictor) if isinstance(self.predictor, str) else self.predictor
        low = None if self.low_memory is None else parse_bytes(self.low_memory)
        guard = MemoryGuard(low, self.memory_drop)
        return DynPlanner(self.every, self.windows, self.gain, self.horizon, search, predictor, guard)

    @staticmethod
    def choose_stages(
        profile: ModelProfile,
        cluster: Cluster,
        rows: int,
        microbatches: int = 1,
        *,
        batches: Mapping[int, float] = MappingProxyType({}),
        theory: Mapping[str, float] = MappingProxyType({}),
        executable: bool = True,
        sharded: bool = False,
        cached: bool = False,
    ) -> StageChoice:
        """Return the number of stages with the least T(S) W(S), and all that were tried (Algorithm 1).

        Args:
            rows: of a batch.
            batches: by number of stages the batches that runs took until the target; T(S) is fitted to them.
            theory: instead, `loss`, `lipschitz`, `noise`, `lr` and `target` of Theorem 1. Without either T(S) is 1.
            executable: only what can run, without shards.
            sharded: also shards of the layers of all stages alike, which the module has to make.
            cached: devices keep two weight versions and MemorySwap the rest on the host; else stage s keeps p - s.

        Raises:
            InputError: both `batches` and `theory`; nothing fits.
        """
        if batches and theory:
            raise InputError("batches that were measured and theory both say T(S); give one of them")
        pricing = Pricing(profile, cluster, rows, microbatches, shared=True, cached=cached)
        iterations = Iterations.from_measured(batches) if batches else Iterations(1.0, 0.0)
        if theory:
            constants = Constants(theory["loss"], theory["lipschitz"], theory["noise"])
            iterations = Iterations.of_theory(constants, theory["lr"], theory["target"])
        return choose_stages(pricing, iterations, executable=executable, sharded=sharded)

    @staticmethod
    def train_predictor(
        windows: Iterable[tuple[Mapping[str, float], HostedStage, float, str, str, int]] | None,
        data: Path | None,
        forest: Path,
    ) -> dict[str, float]:
        """Train the forest of `predictor`, and return how well it predicts kinds of neighbours that it has not seen.

        Args:
            windows: stages beside neighbours, see `Dataset.from_windows`; None reads them from `data`.
            data: a file that keeps them.
            forest: the file for the forest.

        Raises:
            InputError: neither windows nor data; `data` can't be read.
        """
        if windows is None and data is None:
            raise InputError("a predictor learns from windows, or from a file of them; give either")
        if windows is None:
            assert data is not None
            dataset = Dataset.load(data)
        else:
            dataset = Dataset.from_windows(windows)
            if data is not None:
                dataset.save(data)
        found: dict[str, float] = {"windows": len(dataset)}
        for name, model in (("formula", Formula), ("forest", CorrectedFormula)):
            score, _ = cross_validated(model, dataset.without_each(dataset.neighbours))
            found |= {f"{name}_r2": score.r2, f"{name}_mae": score.mae}
        learned = dataset.cross_pairs().sample_rows()
        CorrectedFormula().fit(learned.rows, learned.ratios).forest.save(forest)
        return found


@lru_cache
def _loaded(path: str) -> Predictor:
    return Predictor.load(path)
