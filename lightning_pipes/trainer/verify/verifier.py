"""Verification of the first batches of a pipeline against one plain process that trains the same batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_pipes.engine.compute.rng import AFTER_LAYERS, BEFORE_LAYERS
from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.ir import F, Kind, PipelineError, Plan, Policy, Schedule, Span
from lightning_pipes.ir.passes import run_spans
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.data.batches import checksum_batch
from lightning_pipes.trainer.loop.run import PipelineRun, StageListener
from lightning_pipes.trainer.plan.settings import Verify
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.verify.comparison import (
    GRADIENTS,
    NEGLIGIBLE_EPS,
    Comparison,
    ComparisonResult,
    Difference,
    RepetitionSpread,
    Rounding,
    describe_difference,
    format_value,
    is_awaited,
    save_finding,
)
from lightning_pipes.trainer.verify.record import (
    OUTSIDE,
    LayerInputs,
    ModuleParts,
    Phase,
    Record,
    ValueKey,
    add_results,
    add_settings,
    join_names,
)
from lightning_pipes.trainer.verify.reference import (
    Answer,
    Order,
    PipelineWeights,
    ReferenceEnded,
    ReferenceProcess,
    Repetition,
    call_after,
)
from lightning_pipes.trainer.verify.sample_draws import SampleDraws
from lightning_pipes.trainer.verify.slices import LayerSlices

NAME = "PipelineStrategy(verify={})"
N_BATCH_REPETITIONS = 16
"""The number of times that one process repeats a batch that differs, with weights that are rounded differently."""


class VerificationError(PipelineError):
    """A batch of a pipeline differs from the batch that one plain process trains."""


def check_verifiable(schedule: Schedule | Policy) -> None:
    """Check whether a schedule trains the same weights as one process, so that it can be verified.

    Raises:
        PipelineError: stages read stale weights.
    """
    if isinstance(schedule, Schedule) and not schedule.flushes:
        raise PipelineError(
            f"verify compares with one plain process, which trains every batch by the newest weights; schedule "
            f"{schedule.name!r} trains by weights that miss updates, so it can't be equal. Verify the module with a "
            "schedule that flushes, such as '1f1b', and leave verify out here"
        )


def find_dropout(module: nn.Module) -> str | None:
    """Return the class of the first active dropout in a module, or None."""
    drops = (p for p in module.modules() if "Dropout" in type(p).__name__ and p.training and getattr(p, "p", False))
    return next((type(p).__name__ for p in drops), None)


class Verifier(StageListener):
    """Record the values of the first batches on this rank, and compare them with the values of the reference.

    Collective: all ranks create one and make the same calls.

    Args:
        wanted: the number of batches to verify, and the reaction to a difference.
        reference: the plain process, on rank 0.
        trainer: the trainer.
        run: the run of the pipeline.
        seed: the seed of the random streams.
    """

    def __init__(
        self, wanted: Verify, reference: ReferenceProcess | None, trainer: pl.Trainer, run: PipelineRun, seed: int
    ) -> None:
        self._wanted, self._reference, self._trainer, self._run, self._seed = wanted, reference, trainer, run, seed
        self._control: Control = run.control
        self._rank = self._control.ranks[self._control.position]
        self._comparison = Comparison(self._rank)
        self._records: dict[int, Record] = {}
        self._current: tuple[Record, Span] | None = None
        self._stepping: dict[int, ValueKey] = {}
        self._batches = 0
        self._over = False
        self._slices: LayerSlices | None = None
        self._running: Span | None = None
        self._found: list[Difference] = []
        self._jumps: list[int] = []
        self._ends_early = False
        cut, self._units = run.cut, run.user_steps.stream_units
        self._parts = parts_of_run(run)
        streams = self._units is None and run.is_asynchronous  # they may run layers of other ranks
        self._inputs = LayerInputs(dict(enumerate(cut.full)) if streams else self._parts.layers, lambda: self._current)
        weights = Record(-1)
        self._parts.add_weights(weights, has_buffer=lambda _: False)
        self._weights = {key: value for key, value in weights.values.items() if key.phase is Phase.WEIGHT}
        self._comparison.remember_weights({key.name: value for key, value in self._weights.items()})
        self._undo = [
            self._inputs.remove,
            call_after(cut.module, "configure_gradient_clipping", self._before_step),
        ]
        run.listeners.append(self)

    # ---- called by the run

    def before_inject(self, item: Item) -> None:
        """Begin the record of a batch that is about to go through the pipeline, and send an order to the reference."""
        if self._over or not item.training:
            return
        if item.data.token_cut is not None:
            self._check_draws()
        record = self._records[item.number] = Record(item.number, complete=item.data.complete)
        record.add(Phase.BATCH, OUTSIDE, "the batch", checksum_batch(item.data.loaded_batch))
        self._parts.add_modes(record)
        self._place = item.job, item.number, item.rows
        if self._slices is not None:
            self._slices.begin_batch()
        elif self._reference is not None:
            spans = spans_of_streams(self._run, item.rows)
            adopts = not self._run.is_asynchronous
            order = Order(item.number, item.rows, self._parts.path, self._seed, item.job, spans, self._units, adopts)
            self._reference.send(order)

    def _check_draws(self) -> None:
        """Refuse a batch whose micro-batches are cropped if it draws random numbers, or if layers are compared alone.

        Raises:
            PipelineError: the batch can't be compared.
        """
        dropout = find_dropout(self._run.cut.module)
        if dropout is not None or self._slices is not None:
            why = "the module is too large for one process" if dropout is None else f"a {dropout} is active"
            raise PipelineError(
                f"verify compares batches whose sequences are sorted into micro-batches only by their results, and "
                f"{why}, so the results can't be equal. Set dropout to 0 and verify a smaller configuration, or verify "
                "with microbatches_by='samples'"
            )

    def before_forward(self, stage: Stage, item: Item, span: Span) -> None:
        """Select the record and the span of a micro-batch that is about to go through a stage."""
        record = self._records.get(item.number)
        new = item.training and not stage.recomputing and record is not None and item.data.token_cut is None
        self._current = (record, span) if new and record is not None else None
        self._running = span if item.training and record is not None else None

    def before_repetition(self) -> None:
        """Record nothing until the next micro-batch of the training."""
        self._current = self._running = None

    def after_result(self, number: int, batch: Any, out: Any) -> None:
        self._keep_result(number, out)

    def before_optimizer_step(self, stage: Stage, item: Item) -> None:
        """Record the gradients of a batch that a stage of a stream is about to step."""
        record = self._records.get(item.number)
        self._stepping = {}
        if record is None:
            return
        for key, parameter in self._stage_tensors(stage, item, nn.Parameter):
            if parameter.grad is not None:
                record.add(Phase.GRADIENT, *key, parameter.grad)
            self._stepping[id(parameter)] = ValueKey(Phase.STEP_GRADIENT, *key)
        self._stepped_record = record

    def after_optimizer_step(self, stage: Stage, item: Item) -> None:
        record = self._records.get(item.number)
        self._stepping = {}
        if record is None:
            return
        for key, tensor in self._stage_tensors(stage, item, object):
            phase = Phase.WEIGHT if isinstance(tensor, nn.Parameter) else Phase.BUFFER
            record.add(phase, *key, tensor)

    def _stage_tensors(self, stage: Stage, item: Item, kind: type) -> list[tuple[tuple[int, str], Any]]:
        """Return the tensors of the layers that a batch steps on a stage, each with its layer and its name."""
        use = item.use
        layers = map(str, stage.layers) if use is None else use.stepped_layers(stage.number)
        found = []
        for name in layers:
            number, _, inner = name.partition(".")
            prefix = join_names(self._parts.layer_name(int(number)), inner)
            found += [
                ((int(number), join_names(prefix, key)), tensor)
                for key, tensor in stage.named_tensors(name).items()
                if isinstance(tensor, kind)
            ]
        return found

    # ---- called by the strategy

    def training_step_ended(self, out: Any) -> None:
        """Record the result of the training step of a batch."""
        if not self._run.is_asynchronous and self._records:
            self._keep_result(max(self._records), out)

    def backward_ended(self) -> None:
        """Record the gradients of a batch, after the hooks around its backward have run."""
        if self._run.is_asynchronous or not self._records:
            return
        record = self._records[max(self._records)]
        if record.complete or self._slices is not None:
            self._parts.add_gradients(record, Phase.GRADIENT)
        if self._slices is not None:
            self._compare_slices(record, self._slices)

    def batch_ended(self) -> None:
        """Compare a batch after all of its hooks have run. Collective.

        Raises:
            VerificationError: the batch differs from the batch that one process trains.
        """
        if self._over or not self._records:
            return
        run, trainer = self._run, self._trainer
        newest = self._records[max(self._records)]
        self._batches = len(self._records) if run.is_asynchronous else self._batches + 1
        ends = self._has_all(newest)
        if run.is_asynchronous:
            if not ends:
                return
            run.drain()
        self._parts.add_weights(newest, has_buffer=self._has_buffer)
        for name, value in private.logged_values(trainer).items():
            newest.add(Phase.LOG, OUTSIDE, name, value)
        for number in sorted(self._records):
            record = self._records.pop(number)
            if self._report_slices() if self._slices is not None else self._compare(record):
                self._finish()
                return
        if ends and self._batches:
            self._say_equal()
            self._finish()

    def _has_all(self, newest: Record) -> bool:
        """Return whether a batch is the last one to compare."""
        return newest.complete and self._batches >= self._wanted.batches

    def training_ended(self) -> None:
        """Finish the comparison at the end of training, which may come after fewer batches than requested."""
        if self._over:
            return
        self.batch_ended()
        if not self._over:
            self._say_equal()
            self._finish()

    def close(self) -> None:
        """End the reference, and drop the recorded values."""
        self._over = True
        self._records.clear()
        self._weights.clear()
        self._stepping.clear()
        self._comparison.forget_weights()
        self._current, self._slices, self._stepped_record, self._found = None, None, Record(-1), []
        for undo in self._undo:
            undo()
        self._undo = []
        if self in self._run.listeners:
            self._run.listeners.remove(self)
        if self._reference is not None:
            self._reference.close()
            self._reference = None

    # ---- comparison

    def _has_buffer(self, name: str) -> bool:
        """Return whether this rank compares a buffer outside of the layers. Other ranks may have a stale copy of it."""
        owned = self._run.cut.owns(name)
        return self._run.is_last_rank if owned is None else owned

    def _keep_result(self, number: int, out: Any) -> None:
        record = self._records.get(number)
        if record is not None and self._run.is_last_rank:
            add_results(record, out)

    def _before_step(self, optimizer: Any, *_: Any, **__: Any) -> None:
        plain = private.plain_optimizer(optimizer)
        optimizers = [private.plain_optimizer(each) for each in self._trainer.optimizers]
        which = next((n for n, each in enumerate(optimizers) if each is plain), 0)
        if self._run.is_asynchronous:
            for group in plain.param_groups if self._stepping else ():
                for parameter in group["params"]:
                    key = self._stepping.get(id(parameter))
                    if key is not None and parameter.grad is not None:
                        self._stepped_record.add(*key, parameter.grad)
            if self._stepping:
                add_settings(self._stepped_record, which, plain)
        elif self._records:
            record = self._records[max(self._records)]
            self._parts.add_gradients(record, Phase.STEP_GRADIENT)
            add_settings(record, which, plain)

    def _compare(self, record: Record) -> bool:
        """Compare one batch with the batch of the reference, and return whether the verification ends here."""
        control, source = self._control, self._run.last_rank
        own = {key for key in record.values if key.phase in GRADIENTS or key.phase is Phase.WEIGHT}
        known = set().union(*control.all_gather(own))
        if self._run.is_asynchronous:
            self._carry_weights(record, known)
        told, spread, first_answers = "", RepetitionSpread(), list[Answer]()
        for attempt in range(N_BATCH_REPETITIONS + 1):
            before = self._comparison.copy_state()
            found: list[Difference] = []
            while True:
                received = None if self._reference is None else self._reference.receive(control.watch.check)
                answer = control.broadcast(received, source)
                if isinstance(answer, ReferenceEnded) and answer.too_large:
                    self._turn_to_slices(answer.reason)
                    return False
                if isinstance(answer, ReferenceEnded):
                    self._report(told or f"the plain process ended in batch {record.number}: {answer.reason}")
                    return True
                found += self._compare_part(record, answer, known)
                spread.add({key: value for key, value in answer.values.items() if key in record.values})
                first_answers += [] if attempt else [answer]
                if answer.last:
                    break
            first = self._first_difference(found)
            if first is None:
                return self._accept(record, known, attempt > 0, answer.continues)
            told = told or self._describe(first, answer.notes)
            if not self._may_be_rounding(first, answer.rounding):
                self._report(told)
                return True
            self._comparison.set_state(before)
            if self._reference is not None and attempt < N_BATCH_REPETITIONS:
                self._reference.send(Repetition(attempt))
        found = [each for answer in first_answers for each in self._compare_part(record, answer, known, spread)]
        if self._first_difference(found) is None:
            return self._accept(record, known, True, False)
        self._report(told)
        return True

    def _first_difference(self, found: Sequence[Difference]) -> Difference | None:
        """Return the first of the differences on all ranks. Collective."""
        of_ranks = self._control.all_gather(min(found, key=lambda each: each.order, default=None))
        return min((each for each in of_ranks if each is not None), key=lambda each: each.order, default=None)

    def _may_be_rounding(self, difference: Difference, rounding: Rounding) -> bool:
        """Return whether a difference may come from a jump of a function.

        At a jump, such as the jump of the slope of ReLU at 0, rounding decides which side a value is on. In this case,
        one process can produce the same difference if its weights are rounded differently.
        """
        exact = (Phase.BATCH, Phase.MODE, Phase.FROZEN, Phase.SETTING)
        return not self._run.is_asynchronous and rounding.eps > NEGLIGIBLE_EPS and difference.key.phase not in exact

    def _accept(self, record: Record, known: set[ValueKey], repeated: bool, continues: bool) -> bool:
        """Record that a batch is equal, and return whether the comparison ends here. Collective.

        Args:
            record: the record of the batch.
            known: the gradients and weights that the ranks have recorded.
            repeated: whether the batch is equal only to a repetition.
            continues: whether the reference continues with the weights of the pipeline.
        """
        if repeated:
            self._jumps.append(record.number)
        self._ends_early = not continues
        if continues:
            if not self._run.is_asynchronous and not self._has_all(record):
                self._send_weights(record, known)
            return False
        self._say_equal()
        return True

    def _send_weights(self, record: Record, known: set[ValueKey]) -> None:
        """Send the weights of all ranks to the reference, layer by layer. Collective."""
        layers = sorted({key.layer for key in known if key.phase is Phase.WEIGHT}) or [OUTSIDE]
        for layer in layers:
            own = {key.name: value for key, value in record.values.items() if key[:2] == (Phase.WEIGHT, layer)}
            of_ranks = self._control.all_gather(own)
            if self._reference is not None:
                weights = {name: value for each in of_ranks for name, value in each.items()}
                self._reference.send(PipelineWeights(weights, layer == layers[-1]))

    def _describe(self, first: Difference, notes: Sequence[str]) -> str:
        if self._units is None:
            return describe_difference(first, notes, [*self._run.cut.full])
        modules = [*self._units.number_modules(self._run.cut.module).values()]
        return describe_difference(first, notes, modules, self._units.modules)

    def _turn_to_slices(self, reason: str) -> None:
        """Compare each layer separately from the next batch on."""
        if self._units is not None:
            raise PipelineError(
                f"verify: {reason}, and a module that is cut by units can't be compared layer by layer. Verify a "
                "smaller configuration of the module, or start it on a host with more memory"
            )
        if self._run.is_asynchronous:
            raise PipelineError(
                f"verify: {reason}; layers of a schedule that does not flush can't be compared alone. Verify a smaller "
                "module, or with a schedule that flushes, such as '1f1b'"
            )
        rank_zero_warn(
            f"{NAME.format(self._wanted)}: {reason}, so each layer is compared separately, with its inputs, outputs "
            "and gradients. Code around the layers, optimizers and logs are not compared"
        )
        run = self._run
        self._batches, self._draws = 0, SampleDraws(run.device)
        self._slices = LayerSlices(self._parts.layers, lambda: self._running, run.device)
        self._undo.insert(0, self._slices.remove)

    def _compare_slices(self, record: Record, slices: LayerSlices) -> None:
        """Compare the layers of this rank with the same layers on the whole batch, before an optimizer steps."""
        run, first = self._run, self._trainer.fit_loop.batch_idx % self._trainer.accumulate_grad_batches == 0
        tied = {name for _, name, p in self._parts.parameters() if not run.local_layers.holdings.in_one_stage(p)}
        gradients = {key: value for key, value in _gradients(record.values).items() if key.name not in tied and first}
        job, number, rows = self._place
        self._draws.begin_batch(self._seed, job, number, rows)
        kind = run.device.type
        with run.user_steps.step_context():
            cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            ours, theirs = slices.compare_with(self._draws, rows, gradients, self._parts.layer_name)
        self._found = self._comparison.compare_values(record.number, ours, theirs, Rounding.from_record(theirs, cast))

    def _report_slices(self) -> bool:
        """Report the first difference between a layer on any rank and the same layer on the whole batch.

        Return whether there is a difference.
        """
        of_ranks = self._control.all_gather(min(self._found, key=lambda each: each.order, default=None))
        first = min((each for each in of_ranks if each is not None), key=lambda each: each.order, default=None)
        if first is not None:
            self._report(describe_difference(first, (), [*self._run.cut.full]))
        return first is not None

    def _carry_weights(self, record: Record, known: set[ValueKey]) -> None:
        """Add the weights of this rank that no stage has stepped for a batch of a stream to the record of this
        batch."""
        own = record.values
        self._weights |= {key: value for key, value in own.items() if key.phase is Phase.WEIGHT}
        self._weights = {key: value for key, value in self._weights.items() if key in own or key not in known}
        own |= self._weights

    def _compare_part(
        self, record: Record, answer: Answer, known: set[ValueKey], spread: RepetitionSpread | None = None
    ) -> list[Difference]:
        ours, theirs = record.of_layer(answer.layer), answer.values
        found = self._comparison.compare_values(record.number, ours, theirs, answer.rounding, spread)
        missing = _gradients(theirs).keys() - ours.keys() if record.complete else set()
        if self._run.is_asynchronous:  # any rank may step the layers of a batch
            missing = missing - known if self._run.is_last_rank else set()
        else:
            missing = {key for key in missing if key._replace(phase=Phase.WEIGHT) in ours}
        for key in missing:
            if float(theirs[key].abs().max()) > answer.rounding.allowed_difference(key.phase, theirs[key]):
                found.append(Difference(record.number, key, "none", _size(theirs[key]), "", self._rank))
        for key in _gradients(ours).keys() - theirs.keys():
            if ours[key].any():
                found.append(Difference(record.number, key, _size(ours[key]), "none", "", self._rank))
        if self._run.is_last_rank:
            results = {key for key in ours.keys() ^ theirs.keys() if key.phase is Phase.LOSS}
            found += [Difference(record.number, key, *_one_sided(ours, theirs, key), "", self._rank) for key in results]
        several = len(self._run.engine.plan.spans(Kind.F, 0)) > 1
        return [replace(each, several=several) for each in found]

    def _report(self, text: str) -> None:
        message = f"{NAME.format(self._wanted)}: {text}"
        if self._run.is_last_rank:
            save_finding(ComparisonResult(False, message))
        if not self._wanted.warns:
            self.close()
            raise VerificationError(f"{message}. Set verify='warn' to continue with a warning")
        rank_zero_warn(message)

    def _say_equal(self) -> None:
        compared, largest = zip(
            *self._control.all_gather((self._comparison.compared, self._comparison.largest)), strict=True
        )
        if self._batches:
            batches = f"{self._batches} batch{'' if self._batches == 1 else 'es'}"
            whole = "equal to one process" if self._slices is None else "layers equal to the same layers alone"
            message = (
                f"{NAME.format(self._wanted)}: {whole} over {batches}: {sum(compared)} tensors, largest "
                f"difference {max(largest):.1g}{self._jumps_text}"
            )
            if self._run.is_last_rank:
                save_finding(ComparisonResult(True, message))
            rank_zero_info(message)

    @property
    def _jumps_text(self) -> str:
        """The sentences about batches that were equal only to a repetition."""
        if not self._jumps:
            return ""
        numbers = ", ".join(map(str, self._jumps))
        later = (
            ". Weights differ by that from then on, so later batches were not compared; precision='64-true' compares "
            "all of them"
        )
        return (
            f". In batch {numbers} rounding decided which side of a jump values are on, as at the zero of ReLU: one "
            "process differs from itself as much as from the pipeline if its weights are rounded in another way"
            f"{later if self._ends_early else ''}"
        )

    def _finish(self) -> None:
        if is_awaited():
            self._trainer.should_stop = True
        self.close()


def _weight_names(path: str, part: nn.Module) -> list[str]:
    """Return the names, in the whole module, of the parameters and buffers of the part at `path`."""
    return [join_names(path, name) for name, _ in (*part.named_parameters(), *part.named_buffers())]


def _one_sided(ours: Mapping[ValueKey, Any], theirs: Mapping[ValueKey, Any], key: ValueKey) -> tuple[str, str]:
    here, there = (format_value(values[key]) if key in values else "none" for values in (ours, theirs))
    return here, there


def _size(gradient: torch.Tensor) -> str:
    return f"one of size {float(gradient.norm()):.4g}"


def _gradients(values: Mapping[ValueKey, Any]) -> dict[ValueKey, Any]:
    return {key: value for key, value in values.items() if key.phase in GRADIENTS}


def parts_of_run(run: PipelineRun) -> ModuleParts:
    """Return the layers, or the modules of units, that are on this rank, and the rest of the module."""
    cut, units = run.cut, run.user_steps.stream_units
    if units is None:
        local = {n: layer for n, layer in enumerate(cut.full) if n in cut.local}
        return ModuleParts(cut.module, cut.path, local, list(cut.full._modules))
    names, every = units.modules, units.number_modules(cut.module)
    layers = {n: part for n, part in every.items() if any(map(cut.owns, _weight_names(names[n], part)))}
    return ModuleParts(cut.module, None, layers, names)


def spans_of_streams(run: PipelineRun, rows: int) -> Mapping[int, Sequence[Span]]:
    """Return the spans in which a batch draws random numbers.

    They are given by stage if the module is cut by units. Otherwise, they are given by layer, and for the code before
    and after the layers.
    """
    plan = run.engine.plan
    of_stages = [spans_of_stage(plan, stage, rows) for stage in range(plan.n_stages)]
    if run.user_steps.stream_units is not None:
        return dict(enumerate(of_stages))
    found = {BEFORE_LAYERS: of_stages[0], AFTER_LAYERS: of_stages[-1]}
    for spans, numbers in zip(of_stages, run.local_layers.holdings.layers, strict=True):
        found |= dict.fromkeys(range(*numbers), spans)
    return found


def spans_of_stage(plan: Plan, stage: int, rows: int) -> list[Span]:
    """Return the spans in which a batch goes through a stage."""
    every = [run.clip_to(rows) for span in plan.spans(Kind.F, stage) for run in run_spans(F(stage, span), plan)]
    return [span for span in every if span.rows]
