"""The joint decision of all ranks on the cut of the module and on the schedule, from their measurements."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_pipes.cost import Deployment, ModelProfile
from lightning_pipes.cost.profile import LENGTH_COST_NOTE
from lightning_pipes.cost.units import seconds_text
from lightning_pipes.engine.compute.rng import forked_rng
from lightning_pipes.engine.trees import tensors_in
from lightning_pipes.ir import Kind, PlanError
from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.planning.planner import UNDECIDED
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.cuts.layers.proxy import Layers
from lightning_pipes.trainer.cuts.layers.tape import describe_layer
from lightning_pipes.trainer.data.length_cost import MEASURED_LENGTHS, TOKENS_COST, LengthCost
from lightning_pipes.trainer.data.sample import NoSampleError, batch_rows, example_batch, expected_batches
from lightning_pipes.trainer.data.token_cut import SequenceSample, TokenCutter
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.layer_profiler import (
    CollectiveCall,
    LayerProfiler,
    NotMeasuredError,
    repeats_in_training,
)
from lightning_pipes.trainer.plan.profile_cache import MeasuredRun, ProfileCache, describe_module
from lightning_pipes.trainer.plan.profile_planner import ProfilePlanner
from lightning_pipes.trainer.plan.request import RunRequest
from lightning_pipes.trainer.plan.trial import Trial, Trials
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.ranks import Ranks
from lightning_pipes.trainer.ranks.replicas import has_shards
from lightning_pipes.trainer.weights.deferred import has_meta

SECONDS_UNTIL_LOG = 2.0
"""The number of seconds after which a message explains the work in progress."""
SPEED_TOLERANCE = 0.2
"""The relative difference up to which devices count as equally fast after a single measurement."""
MAX_TRIALS = 3
"""The largest number of cuts that are tried."""
MEASURING_SECONDS = 3.0
"""The seconds for measurements and trials together. The smallest useful numbers of runs and steps are always made."""
MEASURING_SHARE = 0.02
"""The share of the expected run that measurements and trials may take before another cut is tried."""
_profiles: dict[tuple[Any, ...], tuple[ModelProfile, list[float]] | str] = {}
"""The measured profile and the speed of every process, or the reason why nothing was measured.

The key contains everything that the profile depends on, and is the same in all processes. A reason is stored as text,
because an exception would keep objects alive.
"""


@dataclass(frozen=True)
class _Sample:
    """A batch for measurements.

    Attributes:
        rows: the number of samples of a batch of the run.
        batch: the samples that are measured.
        sequences: all sequences of a batch, if they are sorted into micro-batches by length and have several lengths.
    """

    rows: int
    batch: Any
    sequences: SequenceSample | None = None


class PlanDecider(ProfilePlanner):
    """Decides how a module is cut, from the times of its layers.

    All methods are collective: all ranks make one decider and make the same calls.

    Args:
        trainer: the Trainer.
        path: the path of the pipelined container in the Trainer's module.
        ranks: the ranks of the run.
        transport: the name of the transport for messages.
        cache: the profiles of earlier runs.
        shards: the number of ranks over which the optimizer states of a stage are sharded.
        times_steps: whether cuts are tried by running steps. If other trainings compute on the ranks at the same time,
            the duration of a step would include their work.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        path: str,
        ranks: Ranks,
        transport: str,
        cache: ProfileCache,
        shards: int = 1,
        times_steps: bool = True,
    ) -> None:
        super().__init__(ranks, transport)
        self._trainer = trainer
        self._path = path
        self._cache = cache
        self._shards = shards
        self._times_steps = times_steps
        layers = trainer.lightning_module.get_submodule(path)
        assert isinstance(layers, Layers)
        self._layers = layers
        self._collective = CollectiveCall(ranks.control)

    def decide(self, request: RunRequest, plain: Decision) -> Decision:
        """Return the decision.

        The result is `plain` if there is nothing to choose. If the layers are not measured, the reason is in `why`.

        Raises:
            PlanError: a schedule is to be chosen, and none fits into memory; or no plan fits into the memory limit of
                the user.
        """
        if not request.needs_profile or self._grid.length == 1 or self._trainer.limit_train_batches == 0:
            return plain
        if not plain.schedule.flushes and not request.may_replan and request.recompute != UNDECIDED:
            reason = f"{plain.schedule.name} does not flush between batches, so there is no step to balance"
            return self._keep_even_cut(request, plain, reason, quiet=True)
        purpose = "to cut them by time" if request.needs_times else "to choose the stages that recompute"
        with _log_if_slow(f"Measuring the layers of self.{self._path}, {purpose}", self._control):
            try:
                made = self._decide_by_times(request, plain)
            except NotMeasuredError as why:
                if repeats_in_training(why.__cause__, self._trainer):
                    raise why.__cause__ from None
                return self._keep_even_cut(request, plain, str(why), why.quiet)
            except PlanError as error:
                if request.chooses:
                    raise PlanError(f"schedule='auto': {error}") from None
                if request.planner.has_memory_limit:
                    raise
                return self._keep_even_cut(request, plain, str(error), False)
        rank_zero_info("\n".join(filter(None, [made.table, made.why, made.cut_reason])))
        return made

    def _keep_even_cut(self, request: RunRequest, plain: Decision, reason: str, quiet: bool) -> Decision:
        what = f"Schedule {plain.schedule.name!r} is used, with layers" if request.chooses else "The layers are"
        stay = ", and replan will not move them because their times are unknown" if request.may_replan else ""
        if (not quiet and request.needs_times) or stay:
            rank_zero_info(f"{what} cut evenly by parameters{stay}: {reason}")
        return replace(plain, why=reason)

    def _decide_by_times(self, request: RunRequest, plain: Decision) -> Decision:
        """Return the decision from measured times.

        Raises:
            NotMeasuredError: the layers cannot be measured.
            PlanError: no decision is possible with these times.
        """
        module = self._trainer.lightning_module
        if has_shards(module):
            raise NotMeasuredError(f"layers of {type(module).__name__} are sharded")
        if self._control.any(has_meta(module))[0]:
            raise NotMeasuredError(f"weights of {type(module).__name__} are on meta until the module is cut")
        if private.has_delayed_training_data(self._trainer):
            raise NotMeasuredError(
                "train_dataloader can't be called before the counters of a resumed run are restored or the batch size "
                "is known"
            )
        data = private.run_data(self._trainer)  # on all ranks: it may draw random numbers
        sampled: list[_Sample] = []
        self._collective(lambda: sampled.append(self._load_sample(request, data)))
        rows, batch = sampled[0].rows, sampled[0].batch
        sizes, pieces = self._choose_sizes(request, rows)
        key = (
            _describe_structure(module, self._layers, batch),
            (
                sizes,
                pieces,
                request.splits_backward,
                str(self._trainer.precision_plugin.precision),
                _name_device(self._device),
            ),
            *(() if self._shards == 1 else (self._shards,)),
            *(("lengths",) if sampled[0].sequences is not None else ()),
        )
        known = _profiles.get(key)
        if not all(self._collective(lambda: known is not None)):
            known = None
        if isinstance(known, str):
            raise NotMeasuredError(known, quiet=True)
        if known is None:
            known = self._find_profile(key)
        if known is None:
            made, speeds, deployment = self._measure(request, plain, data, sampled[0], key)
        else:
            profile, speeds = known
            deployment = self.make_deployment(plain, speeds)
            made = self.plan(request, plain, profile, rows, deployment)
        assert made.profile is not None
        self._keep_run(made.profile, speeds, rows, deployment)
        return made

    def _choose_sizes(self, request: RunRequest, rows: int) -> tuple[Sequence[int], int | None]:
        """Return the numbers of samples to measure, and the number of micro-batches per batch.

        The number of micro-batches is None if the layers must be measured even if they take little time, because the
        number of micro-batches is still to be chosen, or because the user limits the memory.
        """
        sizes = request.microbatch_rows(rows, self._grid.length)
        return sizes, None if request.chooses or request.planner.has_memory_limit else -(-rows // max(sizes))

    def _measure(
        self, request: RunRequest, plain: Decision, data: Any, sample: _Sample, key: tuple[Any, ...]
    ) -> tuple[Decision, list[float], Deployment]:
        """Measure the layers and try cuts, and return the decision, the speed of each process, and the devices.

        Args:
            request: the request of the user.
            plain: the decision without measurements.
            data: the loader of the run.
            sample: the samples for the measurements.
            key: the key under which the profile is kept.

        Raises:
            NotMeasuredError: the layers cannot be measured.
        """
        rows, batch = sample.rows, sample.batch
        sizes, pieces = self._choose_sizes(request, rows)
        begun = read_seconds()
        try:
            with LayerProfiler(self._trainer, self._path, batch, sizes, self._device, self._collective) as profiler:
                own = with_sharded_states(profiler.profile(pieces, request.splits_backward), self._shards)
                if sample.sequences is not None:
                    cost = measure_lengths(profiler, sample.sequences, max(sizes))
                    own = replace(own, notes={**own.notes, LENGTH_COST_NOTE: [cost.growth, cost.longest]})
                profile, speeds = self._merge_profiles(
                    own, undisturbed_profile if request.may_replan else ModelProfile.mean_of
                )
                deployment = self.make_deployment(plain, speeds)
                # trials run single batches, alone
                if not plain.schedule.flushes or not self._times_steps or not request.needs_times:
                    made = self.plan(request, plain, profile, rows, deployment)
                else:
                    trials = partial(self._count_seconds_left, begun, expected_batches(self._trainer, data))
                    made = self._try_cuts(request, plain, profile, rows, deployment, profiler, trials)
        except NotMeasuredError as why:
            if why.quiet:
                _profiles[key] = str(why)
            raise
        assert made.profile is not None
        _profiles[key] = made.profile, speeds
        if self._control.position == 0 and set(speeds) == {1.0}:
            self._cache.keep_profile((*key, self._control.size), made.profile)
        return made, speeds, deployment

    def _keep_run(self, profile: ModelProfile, speeds: list[float], rows: int, deployment: Deployment) -> None:
        """Store the measurements for the choice of stages in later runs, if all devices are equally fast."""
        if self._control.position == 0 and set(speeds) == {1.0}:
            run = MeasuredRun(profile, rows, deployment.pipeline.inside)
            self._cache.keep_run(describe_module(self._trainer.lightning_module), run)

    def _find_profile(self, key: tuple[Any, ...]) -> tuple[ModelProfile, list[float]] | None:
        """Return the profile that an earlier run on equal devices has stored, with their speeds, or None."""
        first = self._control.position == 0
        found = self._cache.find_profile((*key, self._control.size)) if first else None
        profile = self._control.broadcast(found, self._control.ranks[0])
        if profile is None:
            return None
        rank_zero_info(
            "The layers are not measured, because an earlier run has stored their times. Run `lightning-pipes profile "
            "--clear` to measure them again"
        )
        _profiles[key] = profile, [1.0] * self._control.size
        return _profiles[key]  # type: ignore[return-value]

    def _load_sample(self, request: RunRequest, loader: Any) -> _Sample:
        """Return a batch with the number of samples that will be measured.

        If sequences are sorted into micro-batches by length, they have the mean length of micro-batches.

        Raises:
            NotMeasuredError: the data do not provide samples.
        """
        try:
            rows = batch_rows(loader)
        except NoSampleError as why:
            raise NotMeasuredError(str(why)) from None
        with forked_rng(self._device):
            most = request.sample_rows(rows, self._grid.length)
            if not request.equal_cuts:
                return _Sample(rows, example_batch(loader, most))
            batch = example_batch(loader, rows)
            sequences = TokenCutter(self._grid.length).sample_sequences(batch, rows, max(2, -(-rows // most)))
            if sequences is None:
                return _Sample(rows, example_batch(loader, most))
            return _Sample(rows, sequences.take(most, sequences.mean), sequences)

    def _merge_profiles(
        self, own: ModelProfile, merge: Callable[[Sequence[ModelProfile]], ModelProfile]
    ) -> tuple[ModelProfile, list[float]]:
        """Merge the profiles of all processes with `merge`.

        If all devices have the same name, they count as equally fast.

        Returns:
            The merged profile and the relative speed of each process.
        """
        names, profiles = zip(*self._control.all_gather((_name_device(self._device), own)), strict=True)
        speeds = [1.0] * len(profiles)
        if len(set(names)) > 1:
            seconds = [_sum_seconds(profile) for profile in profiles]
            mine = seconds[self._control.ranks.index(self._deciding_rank)]
            speeds = [mine / each for each in seconds]
            speeds = [1.0 if 1 - SPEED_TOLERANCE < speed < 1 + SPEED_TOLERANCE else speed for speed in speeds]
        alike = [p.scaled([speed] * len(p.layers), speed, speed) for p, speed in zip(profiles, speeds, strict=True)]
        return merge(alike), speeds

    def _try_cuts(
        self,
        request: RunRequest,
        plain: Decision,
        profile: ModelProfile,
        rows: int,
        deployment: Deployment,
        profiler: LayerProfiler,
        seconds_left: Callable[[float | None], float],
    ) -> Decision:
        """Return the fastest of the decisions that were tried, with a profile that is corrected by the trials.

        Layers may take more time in a pipeline than alone, because ranks share memory and caches, and because messages
        take processor time.
        """
        trials = Trials(profiler, self._ranks, self._transport)
        tried: list[tuple[float, Decision]] = []
        reasons: list[str] = []
        while True:
            made = self.plan(request, plain, profile, rows, deployment)
            if not made.schedule.flushes:  # trials run single batches only
                return replace(made, why="\n".join([*reasons, made.why]))
            m = min(made.plans().microbatches, rows)
            size = -(-rows // m)
            known = [_list_choices(made) == _list_choices(earlier) for _, earlier in tried]
            left = seconds_left(made.computing if tried else None)
            if tried and left <= 0:  # the first steps of the run check these corrected times
                return replace(made, why="\n".join([*reasons, made.why]))
            if any(known) or len(tried) == MAX_TRIALS or size > request.sample_rows(rows, self._grid.length):
                break
            trial = trials.run(made, m, size, deployment, left)
            tried.append((trial.measured / (m * size), made))
            if trial.is_contradicted:
                reasons.append(_describe_contradiction(made, trial))
            profile = profile.scaled(trial.factors(made.layers))
        if tried:
            best = min(tried, key=lambda each: each[0])[1]
            if _list_choices(best) != _list_choices(made):
                made = best.predicted(profile)
        return replace(made, why="\n".join([*reasons, made.why]))

    def _count_seconds_left(self, begun: float, batches: float, step: float | None) -> float:
        """Return the seconds that are left for trials, the same on all ranks.

        Args:
            begun: the time at which this rank began to measure.
            batches: the number of batches of the run.
            step: the seconds of one step, or None to ignore the length of the run.
        """
        allowed = MEASURING_SECONDS if step is None else min(MEASURING_SECONDS, MEASURING_SHARE * batches * step)
        return float(min(self._control.all_gather(begun + allowed - read_seconds())))


def _list_choices(made: Decision) -> tuple[Any, ...]:
    return made.schedule, made.microbatches, made.recompute, made.kept_microbatches, made.ranks, made.layers


def _describe_contradiction(made: Decision, trial: Trial) -> str:
    cuts = [span.start for span in made.layers[1:]]
    return (
        f"A trial step with stages that begin at layers {cuts} took {seconds_text(1e9 * trial.measured)}, but the "
        f"prediction was {seconds_text(1e9 * trial.predicted)}. The layer times were corrected, and the cut was chosen "
        "again"
    )


def measure_lengths(profiler: LayerProfiler, sequences: SequenceSample, rows: int) -> LengthCost:
    """Return the cost of sequences by their lengths, from a forward of all layers for three lengths. Collective.

    The cost is the number of tokens if the layers can't run with these lengths.

    Args:
        profiler: runs the layers.
        sequences: the sequences of a batch.
        rows: the number of sequences of mean length in a micro-batch. All measured batches have about as many tokens.
    """
    tokens, seconds = rows * sequences.mean, dict[int, float]()
    for width in {max(1, sequences.longest // divisor) for divisor in MEASURED_LENGTHS}:
        n = min(max(1, tokens // width), sequences.rows)
        try:
            seconds[width] = profiler.time_layers(sequences.take(n, width)) / (n * width)
        except NotMeasuredError as why:
            rank_zero_info(f"The times of sequences by length are not measured: {why}")
            return TOKENS_COST
    return LengthCost.from_times(seconds) if len(seconds) > 1 else TOKENS_COST


def with_sharded_states(profile: ModelProfile, shards: int) -> ModelProfile:
    """Return a profile with the optimizer states of one of several shards."""
    layers = [replace(each, optimizer_bytes=-(-each.optimizer_bytes // shards)) for each in profile.layers]
    return replace(profile, layers=tuple(layers))


def undisturbed_profile(profiles: Sequence[ModelProfile]) -> ModelProfile:
    """Return the mean profile of equal devices, in which slow devices are scaled to the speed of the fastest one.

    A device counts as slow if it differs by more than `SPEED_TOLERANCE`, because other work on it disturbs the
    measurement.
    """
    seconds = [_sum_seconds(profile) for profile in profiles]
    shares = [min(seconds) / each for each in seconds]
    shares = [share if share < 1 - SPEED_TOLERANCE else 1.0 for share in shares]
    return ModelProfile.mean_of(
        [p.scaled([share] * len(p.layers), share, share) for p, share in zip(profiles, shares, strict=True)]
    )


def _sum_seconds(profile: ModelProfile) -> float:
    """Return the seconds of all layers for the largest measured number of samples."""
    rows = profile.layers[0].forward[-1][0]
    kinds = (Kind.F, Kind.B)
    return sum(profile.seconds(kind, n, rows) for n in range(len(profile.layers)) for kind in kinds)


def _name_device(device: torch.device) -> str:
    """Return a name that only devices of equal speed have in common."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU of {socket.gethostname()}, {torch.get_num_threads()} threads"


def _describe_structure(module: nn.Module, full: Layers, batch: Any) -> tuple[Any, ...]:
    """Return all properties, other than the device, on which the times of the layers depend."""
    layers = tuple(describe_layer(layer, number) for number, layer in enumerate(full))
    weights = {id(weight) for weight in full.parameters()}
    # a trained weight before the layers receives its gradient through them
    trained = tuple(n for n, w in module.named_parameters() if id(w) not in weights and w.requires_grad)
    return (
        f"{type(module).__module__}.{type(module).__qualname__}",
        layers,
        trained,
        tuple((tuple(t.shape), str(t.dtype)) for t in tensors_in(batch)),
    )


@contextmanager
def _log_if_slow(what: str, control: Control) -> Iterator[None]:
    """Log the work in progress on rank 0 if it takes long."""
    timer = threading.Timer(SECONDS_UNTIL_LOG, rank_zero_info, (f"{what} ...",))
    timer.daemon = True
    if control.position == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
