"""Stages: consecutive layers that run as a unit on one rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from lightning_pipes.engine import trees
from lightning_pipes.engine.compute.layer_parameters import LayerOffload, LayerParameters
from lightning_pipes.engine.compute.reducer import ReplicaAverages
from lightning_pipes.engine.compute.rng import (
    AFTER_LAYERS,
    BEFORE_LAYERS,
    random_state,
    read_generators,
    same_random_state,
    seed_all,
    seed_for_layer,
    set_generators,
    stream_seed,
)
from lightning_pipes.engine.compute.spans import Item, remove_marks
from lightning_pipes.engine.compute.weights import (
    BuffersBefore,
    Change,
    LateWeights,
    OffloadedVersions,
    WeightVersion,
    WeightVersions,
)
from lightning_pipes.engine.private_torch import BatchNorm
from lightning_pipes.engine.residency.layer_memory import LayerMemory, VersionMemory
from lightning_pipes.engine.residency.mirrors import MirroredLayers, Mirrors
from lightning_pipes.engine.residency.upcoming import PredictorChoice
from lightning_pipes.ir import Kind, LayerUse, Plan, PlanError, Span
from lightning_pipes.ir.clock import read_seconds

MIXING_LAYERS = (BatchNorm,)
"""Layers in which the output for a sample depends on the other samples during training."""


class SampleIndependenceCheck:
    """Checks that the output for a sample does not depend on the other samples of a micro-batch.

    The check is needed if a forward runs once for all samples and again, in parts, before its backwards. If samples
    were mixed, the gradients would belong to outputs that the next stage has never received.

    Args:
        stage: the number of the stage.
        span: the samples of the forward.
        device: the device whose random generator is checked.
    """

    def __init__(self, stage: int, span: Span, device: torch.device) -> None:
        self._where = f"stage {stage} runs the forward of samples {span.start}:{span.stop} in one piece"
        self._device = device
        self._seeded_for = ""
        self._seeded: dict[str, Any] | None = None

    def note_seeded(self, seeded_for: str, everything: bool) -> None:
        """Record the states of the random generators after they were seeded for code that must not draw random numbers.

        Args:
            seeded_for: a description of the code, for the error message.
            everything: whether the generators of Python and NumPy are checked in addition to the generators of torch.
        """
        state = random_state(self._device)
        self._seeded_for, self._seeded = (
            seeded_for,
            state if everything else {name: state[name] for name in state.keys() & _TORCH},
        )

    def check_drawn(self) -> None:
        """Check that no random numbers were drawn since the last call of `note_seeded`.

        Raises:
            PlanError: random numbers were drawn.
        """
        if self._seeded is not None and not same_random_state(self._seeded, random_state(self._device)):
            self._refuse(f"{self._seeded_for} draws random numbers")

    def check_layer(self, number: int | str, layer: nn.Module) -> None:
        """Check that a layer contains no module that is known to mix samples.

        Args:
            number: the number or the name of the layer.
            layer: the layer.

        Raises:
            PlanError: the layer contains such a module.
        """
        for part in layer.modules():
            if isinstance(part, MIXING_LAYERS) and part.training:
                self._refuse(f"layer {number} holds a {type(part).__name__}, which looks at all samples at once")

    @contextmanager
    def check_buffers(self, number: int, layer: nn.Module) -> Iterator[None]:
        """Check that a layer does not change its buffers inside the block.

        If it did, the second forward, which runs in parts, would read other values than the first one.

        Raises:
            PlanError: the layer changes a buffer.
        """
        before = {name: (buffer, buffer._version) for name, buffer in layer.named_buffers()}
        yield
        for name, buffer in layer.named_buffers():
            if name in before and (buffer is not before[name][0] or buffer._version != before[name][1]):
                self._refuse(f"layer {number} changes its buffer {name!r}")

    def _refuse(self, why: str) -> None:
        raise PlanError(
            f"{self._where}, and again in parts for its backwards, which would give something else: {why}. Split this "
            "stage's forward too, by a plan without whole_forward for it, or cut forward and backward equally"
        )


_TORCH = {"torch", "cuda"}


Body = Callable[["Stage", Item, Span, Any], Any]
"""Computes the output that a stage sends: body(stage, item, span, received)."""


def layers_only(stage: Stage, item: Item, span: Span, received: Any) -> Any:
    """Run the received tensors through the layers of the stage: the body of a middle stage."""
    return stage.run_layers(item, span, received)


IN_PLACE_ERROR = "a leaf Variable that requires grad"
"""The autograd error for layers that work in place on received tensors, which are graph leaves only within a stage."""


def clone_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a received tensor if it is a leaf that requires gradients; other tensors are returned unchanged.

    A layer that works in place can change the copy.
    """
    return tensor.clone() if tensor.requires_grad and tensor.is_leaf else tensor


@dataclass(frozen=True)
class RankResources:
    """Objects that the stages of a rank share with its engine.

    Attributes:
        mirrors: the copies of other ranks' layers on this rank, if batches may have cuts of their own. Layers are then
            sent to the ranks on which batches use them. When a window is drained, all layers are back on the ranks that
            own them.
        all_layers: all layers of the model by number, in the form that `Stage` takes, if there are mirrors.
        memory: loads the layers of batches to the device and offloads them, if they are there only while they are used.
        predictor: predicts the next tasks for `memory`. If it is None, the rank uses only the batches that it has begun
            and the instructions that are ready.
        version_memory: keeps the weight versions of stages that recompute, if they are offloaded.
        replica_averages: averages the gradients of each batch over replicas separately, if batches overlap.
    """

    mirrors: Mirrors | None = None
    all_layers: Mapping[int, nn.Module] = field(default_factory=dict)
    memory: LayerMemory | None = None
    predictor: PredictorChoice | None = None
    version_memory: VersionMemory | None = None
    replica_averages: ReplicaAverages | None = None


_CPU, NOTHING_SHARED = torch.device("cpu"), RankResources()


class Stage:
    """The layers of one stage, and the code that runs around them.

    Args:
        number: the number of the stage.
        layers: consecutive layers by their number in the whole model. A stage may have no layers.
        body: called once for each micro-batch; axis 0 of its tensors is samples. Stage 0 receives None, and every other
            stage receives the output of the previous stage. During training, the last stage returns the scalar loss of
            the micro-batch, scaled so that the losses of a batch add up to the objective; other stages return the input
            of the next stage.
        step: called when the gradients of a batch are complete; updates the weights and clears the gradients.
        job: the number of the job to which the layers belong.
        last_backward: returns the context of the backward that completes the gradients of a batch.
        named: the layers to which the names in batches refer, if `layers` are wrappers around them.
        clock: receives the number of each layer, the number of samples, and the seconds of its forward in training.
        show_version: returns a context in which the body, and code that backward runs again, reads the weights of a
            version.
        predict: returns a function that predicts the change of a parameter by one update, or None if a batch reads the
            current weights.
        seed: the seed from which the seeds of all random streams are derived.
        device: the device on which the stage computes.
        resources: what the stages of a rank share.
    """

    def __init__(
        self,
        number: int,
        layers: Mapping[int, nn.Module],
        body: Body = layers_only,
        step: Callable[[Item], None] | None = None,
        job: int = 0,
        last_backward: Callable[[Item], AbstractContextManager[None]] | None = None,
        named: Mapping[int, nn.Module] | None = None,
        clock: Callable[[int, int, float], None] | None = None,
        show_version: Callable[[WeightVersion], AbstractContextManager[None]] | None = None,
        predict: Callable[[Item], Change | None] = lambda item: None,
        seed: int = 0,
        device: torch.device = _CPU,
        resources: RankResources = NOTHING_SHARED,
    ) -> None:
        self.number = number
        self.layers = dict(layers)
        mirrors = resources.mirrors
        self._mirrored = None if mirrors is None else MirroredLayers(number, mirrors, resources.all_layers)
        if mirrors is None:
            self._parts = LayerParameters(number, self.layers if named is None else named)
        else:
            self._parts = LayerParameters(number, mirrors.layers, mirrors)
        self.body = body
        self.step = step
        self.job = job
        self.last_backward = last_backward
        self.seed, self.device = seed, device
        self._clock = clock
        self.predict = predict
        self.cuts_differ = False
        """Whether the stages and links cut the batch that is running differently."""
        self.unsampled_ids: frozenset[int] = frozenset()
        """Ids of received tensors that hold no samples, although their axis 0 may be as long as the micro-batch."""
        self.runs_again = False
        """Whether the body is running for the first of two times on the same samples."""
        self.recomputing = False
        """Whether the body is running for the second time on the same samples."""
        self.written_buffers: dict[tuple[nn.Module, str], torch.Tensor] = {}
        """Copies of buffers to which the second run of the layers has written, by module and name."""
        self.weights = WeightVersions(self.layers, max_versions=1)
        self.show_version = show_version
        self._version_memory = resources.version_memory
        memory = resources.memory
        self.offload = None if memory is None else LayerOffload(memory, number, self._parts)
        """Keeps layers on the device while tasks use them, if layers are offloaded."""
        self.replica_averages = resources.replica_averages
        """Averages gradients over replicas batch by batch, if batches overlap."""
        self._version: WeightVersion | None = None
        self._read_only_ids: frozenset[int] = frozenset()  # ids of parameters that the batch does not step
        self._buffers = BuffersBefore()
        self._in_parts: SampleIndependenceCheck | None = None
        self._warned_not_splittable = False
        self._unsplit_in_row = 0
        self._changes_input: bool | None = None  # whether a layer works in place on received tensors; None: unknown

    def forward(
        self,
        item: Item,
        span: Span,
        received: Any,
        version: WeightVersion | None,
        runs_again: bool = False,
        again: bool = False,
        in_parts: bool = False,
        cuts_differ: bool = False,
    ) -> Any:
        """Run the body with the weights of `version`.

        Args:
            item: the batch.
            span: the samples of the micro-batch.
            received: the output of the previous stage for these samples; None on stage 0.
            version: the weights to read; None for the live weights.
            runs_again: whether this is the first of two runs on these samples.
            again: whether this is the second run on these samples.
            in_parts: whether the second runs will be in parts, each on some of these samples.
            cuts_differ: whether the stages and links cut the batch differently.

        Returns:
            The output of the body.

        Raises:
            PlanError: the result of a run in parts could differ from the result of this run, or the batch changes
                buffers of layers that it only reads or reads late.
        """
        self._version, self.cuts_differ = version, cuts_differ
        self.runs_again, self.recomputing = runs_again, again
        if item.use is None:
            self._read_only_ids, kept = frozenset(), {}
        else:
            self._read_only_ids = self._parts.read_only_ids(item.use)
            kept = {name: (buffer, buffer._version) for name, buffer in self._parts.read_only_buffers(item.use).items()}
        self._in_parts = SampleIndependenceCheck(self.number, span, self.device) if in_parts else None
        try:
            if cuts_differ:  # otherwise, no tensor is marked
                received, self.unsampled_ids = remove_marks(received)
            out = self.body(self, item, span, received)
            if self._in_parts is not None:
                self._in_parts.check_drawn()
            if kept:
                self._check_read_only(item, kept)
            return out
        finally:
            self._version, self._in_parts = None, None
            self.runs_again = self.recomputing = False
            self.written_buffers = {}

    @property
    def runs_in_parts(self) -> bool:
        """Whether the samples of this run will run a second time in parts."""
        return self._in_parts is not None

    @property
    def read_only_ids(self) -> frozenset[int]:
        """The ids of the live parameters that the running batch reads and does not step."""
        return self._read_only_ids

    @property
    def buffers_before(self) -> BuffersBefore:
        """The values of buffers before the first forward, which the second forward must read again."""
        return self._buffers

    def begin_backward(self) -> None:
        """Discard the buffer values that earlier backwards have used."""
        self._buffers.forget_taken()

    def adopt(self, plan: Plan) -> None:
        """Prepare for windows of a plan.

        The plan limits the versions of the weights. If the stage recomputes all micro-batches, no autograd graph refers
        to its layers and versions between a forward and its backward, so that they may leave the device.
        """
        recomputes_all = plan.recomputes_all(self.number)
        if self.offload is not None:
            self.offload.recompute = recomputes_all
        most = plan.versions[self.number] if plan.shared_weights else 1
        if self._version_memory is not None and most > 1 and recomputes_all:
            self.weights = OffloadedVersions(self.layers, most, self.number, self._version_memory, self.device)
        elif self.weights.max_versions != most:
            self.weights = WeightVersions(self.layers, most)

    def task_context(self, kind: Kind, item: Item) -> AbstractContextManager[None]:
        """Return a context in which the layers of a task are on the device."""
        return nullcontext() if self.offload is None else self.offload.task_context(kind, item)

    def compute_context(self, kind: Kind, item: Item, version: WeightVersion | None) -> AbstractContextManager[None]:
        """Return a context in which the layers of a task are on the device and the weights of `version` can be read."""
        if version is not None and self.show_version is not None:
            return self._version_shown(version, self.show_version)
        return self.weights.on_device(version) if self.offload is None else self._task_and_weights(kind, item, version)

    @contextmanager
    def _version_shown(
        self, version: WeightVersion, show: Callable[[WeightVersion], AbstractContextManager[None]]
    ) -> Iterator[None]:
        with self.weights.on_device(version), show(version):
            yield

    @contextmanager
    def _task_and_weights(self, kind: Kind, item: Item, version: WeightVersion | None) -> Iterator[None]:
        with self.task_context(kind, item), self.weights.on_device(version):
            yield

    def check_use(self, use: LayerUse) -> None:
        """Check that the stage has all layers that a batch uses on it.

        Raises:
            PlanError: the stage has no layer of such a name.
        """
        self._parts.check(use)

    def late_weights(self) -> LateWeights:
        """Return a new store for the layer versions that the batches of a window read late."""
        return LateWeights(self.number, self.layers, self._parts)

    def _check_read_only(self, item: Item, kept: Mapping[str, tuple[torch.Tensor, int]]) -> None:
        for name, (buffer, before) in kept.items():
            if buffer._version != before:
                raise PlanError(
                    f"batch {item.number} changes {name} on stage {self.number} in its forward, as BatchNorm does with "
                    "its running statistics. It shares the layer with other batches in flight, and reads it late or "
                    "does not step it, so the result would depend on their order. Let batches step the layer, without "
                    "a delay; or take track_running_stats=False, another norm, or eval() for it"
                )

    def stepped_parameters(self, item: Item) -> list[nn.Parameter]:
        """Return the parameters of the layers of this stage that `item` steps."""
        if item.use is None:
            return [p for layer in self.layers.values() for p in layer.parameters()]
        return self._parts.parameters(item.use.stepped_layers(self.number))

    def send_gradients(self, item: Item, late: Mapping[int, torch.Tensor | None]) -> None:
        """Send the complete gradients of `item` to the other replicas, if gradients are averaged batch by batch.

        Args:
            item: the batch.
            late: the gradients of the parameters that the batch has read late, by the ids of the live parameters.
        """
        if self.replica_averages is not None:
            names, parameters = self._stepped_names(item), self.stepped_parameters(item)
            gradients = [late.get(id(p), p.grad) for p in parameters]
            self.replica_averages.send(self.number, item.number, names, gradients, self._buffers_of(names))

    def average_gradients(self, item: Item) -> None:
        """Replace the gradients of `item` by their averages over replicas, if gradients are averaged batch by batch."""
        if self.replica_averages is not None:
            names = self._stepped_names(item)
            parameters = self.stepped_parameters(item)
            self.replica_averages.average(self.number, item.number, names, parameters, self._buffers_of(names))

    def _stepped_names(self, item: Item) -> list[str]:
        return sorted(map(str, self.layers) if item.use is None else item.use.stepped_layers(self.number))

    def _buffers_of(self, names: Iterable[str]) -> list[torch.Tensor]:
        tensors = (t for name in names for t in self.named_tensors(name).values())
        return [t for t in tensors if not isinstance(t, nn.Parameter)]

    def named_tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of a layer, or of a part of a layer, by their names within it."""
        return self._parts.named_tensors(name)

    def run_layers(self, item: Item, span: Span, x: Any, is_made_again: bool = False) -> Any:
        """Run `x` through the layers. Each layer draws random numbers from its own stream.

        Args:
            item: the batch.
            span: the samples of the micro-batch.
            x: the input of the first layer.
            is_made_again: whether the second run before backward computes its input again, so that layers may change
                `x` in place.

        Returns:
            The output of the last layer.
        """
        if self.runs_again and not is_made_again and self._changes_input is not False:
            # the second run needs `x` as it is
            copy = trees.map_tensors(torch.clone, x)
            out = self._run_all(item, span, copy)
            self._changes_input = self._changes_input or any(t._version for t in trees.tensors_in(copy))
            return out
        return self._run_all(item, span, x)

    def _run_all(self, item: Item, span: Span, x: Any) -> Any:
        mirrored = self._mirrored
        layers = self.layers if mirrored is None else mirrored.layers_of(item.use, self.layers)
        # Compute all seeds first. Between layers, whose data fills the caches, each seed would take ten times as long.
        seeds = [self._stream(item, span, number) for number in layers]
        for seed, (number, layer) in zip(seeds, layers.items(), strict=True):
            self._seed(seed, number)
            if self._in_parts is not None:
                self._in_parts.check_layer(number, layer)
            if not self._changes_input:
                try:
                    x = self._time_layer(seed, item, span, number, layer, x)
                    continue
                except RuntimeError as error:
                    if IN_PLACE_ERROR not in str(error):
                        raise
                self._changes_input = True
                self.seed_generators(number, seed)
            x = self._time_layer(seed, item, span, number, layer, trees.map_tensors(clone_leaf, x))
        return x

    def _time_layer(self, seed: int, item: Item, span: Span, number: int, layer: nn.Module, x: Any) -> Any:
        if self._clock is None or not item.training or self.recomputing:
            return self._run_layer_with_memory(seed, item, span, number, layer, x)
        begun = read_seconds()
        x = self._run_layer_with_memory(seed, item, span, number, layer, x)
        self._clock(number, span.rows, read_seconds() - begun)
        return x

    def _run_layer_with_memory(self, seed: int, item: Item, span: Span, number: int, layer: nn.Module, x: Any) -> Any:
        """Run a layer, and run it again if other layers had to be evicted from the device to make room for it."""
        if self.offload is None:
            return self._run_layer(item, span, number, layer, x)
        tensors = trees.tensors_in(x)
        before, restore = [t._version for t in tensors], self.offload.keep_buffers(item.use, number)

        def undo() -> bool:
            restore()
            self._buffers.put_back((item.number, span, number))
            seed_all(seed, self.device)
            return before == [t._version for t in tensors]

        return self.offload.run_with_memory(lambda: self._run_layer(item, span, number, layer, x), undo)

    def _run_layer(self, item: Item, span: Span, number: int, layer: nn.Module, x: Any) -> Any:
        key = item.number, span, number
        if self._mirrored is not None and item.use is not None and self._mirrored.is_remote(number):
            changes = item.training and not self.recomputing
            before = self._buffers.take_kept(key) if self.recomputing else {}
            if self.runs_again:
                self._buffers.keep_copies(key, self._mirrored.buffers(item.use, number))
            return self._mirrored.run(item.use, number, layer, x, self._read_only_ids, changes, before)
        tensors = self._tensors(number, layer)
        if self.recomputing:  # running statistics already include this micro-batch
            before = self._buffers.take_kept(key)
            copies = {name: before.get(name, b).clone() for name, b in layer.named_buffers()}
            tensors.update(copies)
            out = functional_call(layer, tensors, (x,)) if tensors else layer(x)
            for name in copies:  # a layer may have replaced the copy by another tensor
                part, _, last = name.rpartition(".")
                self.written_buffers[layer.get_submodule(part), last] = tensors[name]
            return out
        if self.runs_again:
            with self.keep_buffers(key, number, layer):
                return functional_call(layer, tensors, (x,)) if tensors else layer(x)
        return functional_call(layer, tensors, (x,)) if tensors else layer(x)

    def keep_buffers(self, key: tuple[int, Span, int], number: int, layer: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which a layer runs that will run again.

        The second run reads the same buffers. If it runs in parts, the layer must not change any.

        Args:
            key: the numbers of the batch and of the layer, and the samples.
            number: the number of the layer.
            layer: the layer.
        """
        parts = self._in_parts
        return self._buffers.keep_before(key, number, layer) if parts is None else parts.check_buffers(number, layer)

    def check_layers(self, find_layers: Callable[[], Mapping[str, nn.Module]]) -> None:
        """Check that layers mix no samples, if the forward will run again in parts.

        Args:
            find_layers: returns the layers that the body of the stage calls, by name.

        Raises:
            PlanError: a layer contains a module that mixes samples.
        """
        if self._in_parts is not None:
            for name, layer in find_layers().items():
                self._in_parts.check_layer(name, layer)

    def run_backward(
        self,
        item: Item,
        versions: Iterable[WeightVersion | None],
        run: Callable[[], None],
        run_forward: Callable[[], None] | None,
    ) -> None:
        """Run a backward, and run it again if other layers had to be evicted from the device to make room for it.

        Before the second attempt, the gradients of the failed one are discarded and the graph is created by another
        forward.

        Args:
            item: the batch.
            versions: the weight versions that the forwards have read.
            run: runs the backward.
            run_forward: creates the graph again; None if this is not possible, so that the backward is not repeated.
        """
        if self.offload is None:
            run()
            return
        older = {id(v): v for v in versions if v is not None}.values()
        parameters = [p for v in older for each in v.parameters.values() for p in each.values()]
        parameters += self.stepped_parameters(item)
        sums, graphs = [p.grad for p in parameters], [True]

        def attempt() -> None:
            if not graphs and run_forward is not None:
                self._buffers.put_back()
                run_forward()
            graphs.clear()
            run()

        def clear() -> bool:
            for p in parameters:
                p.grad = None
            return run_forward is not None

        clear()
        self.offload.run_with_memory(attempt, clear)
        with torch.no_grad():
            for p, total in zip(parameters, sums, strict=True):
                if total is not None:
                    p.grad = total if p.grad is None else total.add_(p.grad)

    def note_split(self, why: str) -> None:
        """Record whether a backward could be split, and warn once if two backwards in a row could not.

        In that case a split backward has no benefit on this stage. A single backward is ignored, because the split may
        have been prevented by the hooks with which saved tensors are measured.

        Args:
            why: the reason why the latest backward was not split; empty if it was split.
        """
        self._unsplit_in_row = self._unsplit_in_row + 1 if why else 0
        if self._unsplit_in_row == 2 and not self._warned_not_splittable:
            self._warned_not_splittable = True
            warnings.warn(
                f"stage {self.number} computes its weight gradients together with its input gradients, because of "
                f"{why}. On this stage, a schedule that splits the backward is not faster than one that does not, such "
                "as '1f1b'",
                stacklevel=2,
            )

    def seed_user_code(self, item: Item, span: Span, layer: int) -> None:
        """Seed the random generators for user code that runs before or after the layers; see `seed_for_layer`."""
        self._seed(self._stream(item, span, layer), layer)

    def seed_generators(self, layer: int, seed: int) -> None:
        """Seed the random generators for a layer, or for user code around the layers; see `seed_for_layer`."""
        seed_for_layer(layer, seed, self.device)

    def read_generators(self) -> list[torch.Tensor]:
        """Return the states of torch's generators, with which the next stage can continue."""
        return read_generators(self.device)

    def set_generators(self, states: Sequence[torch.Tensor]) -> None:
        """Continue with the states that `read_generators` returned on the previous stage."""
        set_generators(states, self.device)

    def prepare_user_seeds(self, item: Item, spans: Iterable[Span]) -> None:
        """Compute the seeds of user code for several micro-batches at once, which takes a tenth of the time."""
        for span in spans:
            self._stream(item, span, BEFORE_LAYERS)
            self._stream(item, span, AFTER_LAYERS)

    def _stream(self, item: Item, span: Span, layer: int) -> int:
        return stream_seed(self.seed, self.job, layer, item.number, span)

    def _seed(self, seed: int, layer: int) -> None:
        """Seed the random generators for a layer, or for user code around the layers."""
        if self._in_parts is not None:
            self._in_parts.check_drawn()
        self.seed_generators(layer, seed)
        if self._in_parts is not None:
            around = layer in (BEFORE_LAYERS, AFTER_LAYERS)
            self._in_parts.note_seeded("the step around the layers" if around else f"layer {layer}", everything=around)

    def _tensors(self, number: int, layer: nn.Module) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        if self._version is not None:
            tensors.update(self._version.parameters.get(number, {}))
        if self._read_only_ids:
            for name, p in layer.named_parameters():
                if id(p) in self._read_only_ids:
                    tensors[name] = tensors.get(name, p).detach()
        return tensors
