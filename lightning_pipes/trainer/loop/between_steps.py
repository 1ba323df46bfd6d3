"""Checks of the hooks that run between two steps while batches overlap.

Lightning calls hooks in its own order, while earlier batches are still in flight. A hook may change anything that these
batches do not use. A change to a parameter that one of them uses would take effect too early or too late for this
batch, unlike in training with one process, and is rejected.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_pipes.engine.residency.layer_state import ChangeMarks
from lightning_pipes.ir import LayerUse, PipelineError
from lightning_pipes.trainer.cuts.layers.proxy import Layers
from lightning_pipes.trainer.optimizers.optimizers import settings_of
from lightning_pipes.trainer.user.hooks import select_hooks
from lightning_pipes.trainer.user.patches import Patches

N_FIRST_COMPARED_BATCHES, COMPARISON_INTERVAL = 20, 50
"""Values are compared, and all gradients are checked, in the first `N_FIRST_COMPARED_BATCHES` batches and then in every
`COMPARISON_INTERVAL`-th."""
MAX_ALWAYS_CHECKED = 500
"""The largest number of parameters whose gradients are checked in every batch."""

BATCH_HOOKS = select_hooks(lambda hook: hook.is_between_batches)
STEP_HOOKS = select_hooks(lambda hook: hook.is_before_step)


class BetweenSteps:
    """Detects changes by hooks, and gradients, of parameters that batches in flight use.

    Args:
        schedule: the name of the schedule, for messages.
        module: the user's module.
        full: the pipelined layers.
        local: returns the numbers of the layers that are on this rank.
        overridden: returns whether the user overrides any of the given hooks.
        values: whether the values of parameters can be read between batches.
    """

    def __init__(
        self,
        schedule: str,
        module: pl.LightningModule,
        full: Layers,
        local: Callable[[], Iterable[int]],
        overridden: Callable[[Iterable[str]], bool],
        values: bool,
    ) -> None:
        self._schedule, self._module, self._full, self._local = schedule, module, full, local
        self._between, self._before_steps = overridden(BATCH_HOOKS), overridden(STEP_HOOKS)
        self._values = values
        self._parts: dict[str, tuple[nn.Parameter, ...]] = {}
        self._marks = ChangeMarks()
        self._batches = 0
        self._warned_of_settings = False

    def begin_hooks(self, uses: Iterable[LayerUse | None]) -> None:
        """Record the parameters that the batches in flight use. The user's hooks may run until `check` is called."""
        self._batches += 1
        if self._between:
            self._marks = ChangeMarks(list(self._parameters(uses).values()), self._values and self._looks())

    def check(self) -> None:
        """Compare the weights that batches in flight use with their values at `begin_hooks`.

        Raises:
            PipelineError: a hook has changed a weight.
        """
        marks, self._marks = self._marks, ChangeMarks()
        self._compare(marks, "between two batches, as in on_train_batch_start or on_train_batch_end")

    @contextmanager
    def step_hooks(
        self, uses: Iterable[LayerUse | None], own: Iterable[nn.Parameter], optimizers: Sequence[Optimizer]
    ) -> Iterator[None]:
        """Check the hooks that run in the block, before the step of the parameters `own`.

        Args:
            uses: the layers that the batches in flight use.
            own: the parameters that are stepped next, which hooks may change.
            optimizers: the optimizers, whose settings are compared.

        Raises:
            PipelineError: a hook has changed a parameter that a batch in flight uses.
        """
        if not self._before_steps:
            yield
            return
        others = self._parameters(uses)
        for p in own:
            others.pop(id(p), None)
        marks = ChangeMarks(list(others.values()), self._values and self._looks())
        settings = None if self._warned_of_settings else settings_of(optimizers)
        yield
        self._compare(marks, "before the step of another batch, as in on_before_optimizer_step")
        if settings is not None:
            self._warn_of_settings(settings, settings_of(optimizers))

    def _warn_of_settings(self, before: Mapping[str, str], after: Mapping[str, str]) -> None:
        """Warn if a hook has changed a setting of an optimizer before the step of a batch."""
        changed = next((where for where, value in after.items() if before.get(where) != value), None)
        if changed is None:
            return
        self._warned_of_settings = True
        warnings.warn(
            f"a hook of {type(self._module).__name__} or of a callback that runs before the optimizer's step, as "
            f"on_before_optimizer_step, sets {changed} from {before.get(changed, 'nothing')} to {after[changed]}. "
            f"Batches overlap with schedule {self._schedule!r}, so each stage runs it when it steps. Later batches and "
            "schedulers have begun with the old setting. Set it in "
            "on_train_batch_start, in optimizer_step or by a scheduler; or use a schedule that flushes between "
            "batches, such as '1f1b'",
            stacklevel=2,
        )

    def check_gradients(self, number: int, named: Iterable[torch.Tensor], thorough: bool = False) -> None:
        """Check that only parameters that the batches in flight have named have gradients.

        Args:
            number: the number of the batch that has run its backward.
            named: the parameters that may have gradients.
            thorough: whether to check all parameters, regardless of their number.

        Raises:
            PipelineError: another parameter has a gradient.
        """
        every = self._parameters([None])
        if not (thorough or self._looks() or len(every) <= MAX_ALWAYS_CHECKED):
            return
        ids = {id(p) for p in named}
        wrong = [p for at, p in every.items() if p.grad is not None and at not in ids]
        if wrong:
            raise PipelineError(
                f"batch {number}, or one shortly before it, trains {self._named(wrong)}, and layers_of_batch does not "
                f"name the layer. With schedule {self._schedule!r} its gradient would stay for a later batch. Let "
                "layers_of_batch name every layer with parameters that a batch goes through, with False for those "
                "that it only reads"
            )

    def is_used(self, parameter: torch.Tensor, uses: Iterable[LayerUse | None]) -> bool:
        """Return whether batches that use these layers may step a parameter of this rank."""
        return id(parameter) in self._parameters(uses)

    def forget_layers(self) -> None:
        """Forget the parameters of layers after layers have moved between ranks."""
        self._parts.clear()

    def _looks(self) -> bool:
        return self._batches <= N_FIRST_COMPARED_BATCHES or self._batches % COMPARISON_INTERVAL == 0

    def _compare(self, marks: ChangeMarks, when: str) -> None:
        found = marks.find_change()
        if found is not None:
            p, what = found
            raise PipelineError(
                f"a hook of {type(self._module).__name__} or of a callback changes {what} of {self._named([p])} "
                f"{when}. With schedule {self._schedule!r} other batches that use it are under way, and would see the "
                "change too early or too late. Change weights in on_train_epoch_start, or those that a batch steps by "
                "optimizer.register_step_post_hook; or use a schedule that flushes between batches, such as '1f1b'"
            )

    def _named(self, parameters: Sequence[nn.Parameter]) -> str:
        ids = {id(p) for p in parameters}
        names = [name for name, p in self._module.named_parameters() if id(p) in ids]
        return ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])]) or "a parameter"

    def _parameters(self, uses: Iterable[LayerUse | None]) -> dict[int, nn.Parameter]:
        """Return the parameters of this rank that are in the given layers, by id. A use of None means all layers."""
        local = [str(number) for number in self._local()]
        names = {name for use in uses for name in (local if use is None else chain(*use.layers))}
        return {id(p): p for name in names for p in self._of(name)}

    def _of(self, name: str) -> tuple[nn.Parameter, ...]:
        found = self._parts.get(name)
        if found is None:
            number, _, part = name.partition(".")
            here = int(number) in set(self._local())
            found = tuple(self._full[int(number)].get_submodule(part).parameters()) if here else ()
            self._parts[name] = found
        return found


def check_clearing(module: pl.LightningModule, schedule: str, patches: Patches) -> None:
    """Check the gradients after the module's own `optimizer_zero_grad`, until `patches` is closed.

    Raises:
        PipelineError: the method leaves gradients, or sets them to zeros instead of None. This is raised when it runs.
    """
    if not is_overridden("optimizer_zero_grad", module):
        return
    hook = module.optimizer_zero_grad

    def run(epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        probe = next((p for group in optimizer.param_groups for p in group["params"] if p.grad is None), None)
        if probe is not None:
            probe.grad = torch.zeros_like(probe)
        hook(epoch, batch_idx, optimizer)
        left, unset = probe is not None and probe.grad is not None, None
        if probe is not None:
            probe.grad = unset
        if left:
            raise PipelineError(
                f"{type(module).__name__}.optimizer_zero_grad leaves gradients, or zeros in their place. One process "
                "would then step layers that a batch does not use, by momentum and weight decay; schedule "
                f"{schedule!r} would not. Let it call optimizer.zero_grad(), or leave it out; or use a schedule that "
                "flushes between batches, such as '1f1b'"
            )

    patches.replace_method(module, "optimizer_zero_grad", run)
