"""The order of PipeDream, with layers that move between stages during training."""

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
from lightning_pipes.strategies.dynpipe.interference.dataset import Dataset, cross_validated
from lightning_pipes.strategies.dynpipe.interference.predictor import CorrectedFormula, Formula, Predictor
from lightning_pipes.strategies.dynpipe.meshes import Pricing
from lightning_pipes.strategies.dynpipe.planner import DynPlanner, MemoryGuard
from lightning_pipes.strategies.dynpipe.repartition import Search
from lightning_pipes.strategies.dynpipe.stage_search import StageChoice, choose_stages
from lightning_pipes.strategies.pipedream import PipeDream


@dataclass(frozen=True)
class DynPipe(PipeDream):
    """Asynchronous 1F1B with weight stashing that moves layers between stages during training (DynPipe).

    The order and the weight versions are the same as in `pipedream` (S IV-B1). A planner observes the duration of every
    operation, and moves layers away from devices that are slowed down by other programs, called neighbors (S V).

    Attributes:
        every: the number of training batches between two observations. The paper's code observes every 50 batches and
            acts 60 batches later. Here, more frequent observations are cheap, and the planner acts on an observation at
            once.
        windows: the number of consecutive observations in which a move has to save time.
        gain: the minimum share of a step that a move has to save. The paper's text has no threshold. Its code waits
            until a stage takes twice as long as another.
        horizon: the number of batches for which conditions are assumed to stay the same, when the cost of a move is
            compared with its gain.
        top_k: the number of blocks of the condensed model, between which it may be cut (S V-B1). None means as many as
            the search can evaluate.
        incremental: whether layers move only to a neighboring stage.
        predictor: the predictor of interference (S V-A), or the path of a file of `lightning-pipes interference`.
            None means that the planner only uses measured times ("w/o RF").
        low_memory: the number of bytes, such as "2GiB", that has to be free on each device before every batch. If less
            is free, batches no longer overlap until there is enough free memory again. If memory stays short, layers
            leave the device (S V-B2). None means no such limit. It requires an InterferenceMonitor.
        memory_drop: the share of the free memory that may be lost within `every` batches. If more is lost, batches no
            longer overlap. None means no limit.
        predict: as in `pipedream`.
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
        predictor = _train_predictor(self.predictor) if isinstance(self.predictor, str) else self.predictor
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
        """Return the number of stages with the lowest T(S) W(S), and all numbers that were tried (Algorithm 1).

        Args:
            profile: the seconds and bytes of each layer.
            cluster: the devices and links.
            rows: the number of samples in a batch.
            microbatches: the number of micro-batches in a batch.
            batches: the measured number of batches until the target, by number of stages. T(S) is fitted to them.
            theory: the values of `loss`, `lipschitz`, `noise`, `lr` and `target` in Theorem 1, as an alternative to
                `batches`. Without either, T(S) is 1.
            executable: whether to consider only assignments that can run, without shards.
            sharded: whether to also consider assignments in which all stages have the same shards. The module has to
                create the shards.
            cached: whether devices keep two weight versions, with the others on the host by MemorySwap. Otherwise,
                stage s of p keeps p - s versions.

        Raises:
            InputError: both `batches` and `theory` are given, or nothing fits.
        """
        if batches and theory:
            raise InputError("measured batches and theory both specify T(S); give only one of them")
        pricing = Pricing(profile, cluster, rows, microbatches, shared=True, cached=cached)
        iterations = Iterations.from_measured(batches) if batches else Iterations(1.0, 0.0)
        if theory:
            constants = Constants(theory["loss"], theory["lipschitz"], theory["noise"])
            iterations = Iterations.of_theory(constants, theory["lr"], theory["target"])
        return choose_stages(pricing, iterations, executable=executable, sharded=sharded)

    @staticmethod
    def score_predictor(
        windows: Iterable[tuple[Mapping[str, float], HostedStage, float, str, str, int]] | None, data: Path
    ) -> dict[str, float]:
        """Return the accuracy of `predictor` for kinds of neighbors that it was not trained on.

        Args:
            windows: stages that ran next to neighbors; see `Dataset.from_windows`. They are written to `data`. None
                means that they are read from there.
            data: the file of windows, which is a value for `predictor`.

        Returns:
            The number of windows, and the R2 score and the mean absolute error of the formula and of the forest.

        Raises:
            InputError: `data` can't be read.
        """
        dataset = Dataset.load(data) if windows is None else Dataset.from_windows(windows)
        if windows is not None:
            dataset.save(data)
        found: dict[str, float] = {"windows": len(dataset)}
        for name, model in (("formula", Formula), ("forest", CorrectedFormula)):
            score, _ = cross_validated(model, dataset.without_each(dataset.neighbours))
            found |= {f"{name}_r2": score.r2, f"{name}_mae": score.mae}
        return found


@lru_cache
def _train_predictor(path: str) -> Predictor:
    return Dataset.load(path).train_predictor()
