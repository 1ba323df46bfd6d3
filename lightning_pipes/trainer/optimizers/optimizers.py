"""Optimizers that the user configures for the whole module and that are then reduced to the parameters of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.user.patches import Patches
from lightning_pipes.trainer.user.remote_tensors import HookScope, RemoteTensor, no_view

Groups = tuple[tuple[str, ...], ...]
"""The names of the parameters of each parameter group, in the order of the optimizer."""
NamedParameter = tuple[str, torch.Tensor]
"""A parameter with its name in the whole module."""


def check_momentum(optimizers: Iterable[Optimizer], schedule: str) -> None:
    """Check that `predict_change` supports the optimizers.

    Args:
        optimizers: the optimizers of the user.
        schedule: the name of the schedule, for the message.

    Raises:
        PipelineError: an optimizer has no momentum, or it is neither SGD nor Adam nor AdamW of torch.
    """
    for optimizer in optimizers:
        known = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
        if not known or not all(group.get("momentum", 1) for group in optimizer.param_groups):
            raise PipelineError(
                f"schedule {schedule!r} with predict=True extrapolates weights by momentum, and "
                f"{type(optimizer).__name__} has none that is known; use SGD with a momentum, Adam or AdamW, or leave "
                "predict out"
            )


def predict_change(optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor) -> torch.Tensor | None:
    """Predict the change of a parameter by the next update under the assumption that its momentum does not change.

    Weight decay is not included.

    Args:
        optimizer: the optimizer with the state of the parameter.
        group: the settings of the parameter group.
        parameter: the parameter.

    Returns:
        the change, of the same shape as the parameter; None before the first update.
    """
    state = optimizer.state.get(parameter, {})
    rate = -group["lr"]
    if state.get("momentum_buffer") is not None:
        return rate * state["momentum_buffer"]  # type: ignore[no-any-return]
    if "exp_avg" not in state:
        return None
    (beta1, beta2), steps = group["betas"], float(state["step"])
    square = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    scale = (square / (1 - beta2**steps)).sqrt() + group["eps"]
    return rate / (1 - beta1**steps) * state["exp_avg"] / scale  # type: ignore[no-any-return]


class OptimizerLayout:
    """The parameters of an optimizer, both in the whole module and on this rank.

    The state of the optimizer is saved and loaded with the numbering that a single process uses. It therefore does not
    depend on the number of stages. If `configure_optimizers` returns None, Lightning creates a placeholder optimizer
    that has no parameter groups and an empty `state_dict`.

    Args:
        optimizer: the optimizer, created for the whole module.
        whole: the names of all its parameters.

    Attributes:
        local: the names of the parameters that the optimizer has on this rank.
    """

    def __init__(self, optimizer: Optimizer, whole: Groups) -> None:
        self.optimizer = optimizer
        self.whole = self.local = whole
        self._parameters = [list(group["params"]) for group in optimizer.param_groups]
        self._hidden: list[list[torch.Tensor]] = []
        self._shown: list[list[torch.Tensor]] = []
        self._whole: list[list[torch.Tensor]] = []
        self._given_names = [list(group.get("param_names", ())) for group in optimizer.param_groups]

    def keep_local(self, foreign: Callable[[torch.Tensor], bool]) -> None:
        """Restrict the optimizer to the parameters of this rank, and delete the states of other parameters.

        Groups without any parameters are kept, so that schedulers and learning rates are the same on every rank.

        Args:
            foreign: returns whether a parameter is on other ranks only.
        """
        local = []
        for group, names, parameters, given in zip(
            self.optimizer.param_groups, self.whole, self._parameters, self._given_names, strict=True
        ):
            here = [k for k, p in enumerate(parameters) if not foreign(p)]
            for p in parameters:
                if foreign(p):
                    self.optimizer.state.pop(p, None)
            group["params"] = [parameters[k] for k in here]
            if given:
                group["param_names"] = [given[k] for k in here]
            local.append(tuple(names[k] for k in here))
        self.local = tuple(local)

    def show_whole(self, check: Callable[[torch.Tensor | None], None]) -> None:
        """Put the parameters of all ranks into the optimizer. They are the same objects that hooks see in the module.

        Args:
            check: see `WholeStates`.
        """
        self._hidden = [group["params"] for group in self.optimizer.param_groups]
        self._shown = [list(map(RemoteTensor.find_stand_in, parameters)) for parameters in self._parameters]
        self._whole = [list(parameters) for parameters in self._shown]
        self.optimizer.state = WholeStates(self.optimizer.state, self._whole, check)  # type: ignore[assignment]
        for group, parameters in zip(self.optimizer.param_groups, self._shown, strict=True):
            group["params"] = parameters

    def show_local(self) -> list[list[torch.Tensor]] | None:
        """Put the parameters of this rank back into the optimizer.

        Returns:
            the parameters of each group if user code has changed them since `show_whole`; otherwise None.
        """
        groups, shown = self.optimizer.param_groups, self._shown
        now = [list(group["params"]) for group in groups]
        same = len(groups) == len(shown) and all(
            group["params"] is parameters and list(map(id, parameters)) == list(map(id, whole))
            for group, parameters, whole in zip(groups, shown, self._whole, strict=False)
        )
        for group, parameters in zip(groups, self._hidden, strict=False):
            group["params"] = parameters
        if isinstance(self.optimizer.state, WholeStates):
            self.optimizer.state = self.optimizer.state.own  # type: ignore[assignment]
        else:  # the user's code has assigned another object
            for key in [key for key in self.optimizer.state if isinstance(key, RemoteTensor)]:
                del self.optimizer.state[key]
        return None if same else now

    def take_groups(self, groups: Sequence[Sequence[torch.Tensor]], known: Mapping[int, NamedParameter]) -> None:
        """Adopt changed groups that `show_local` has returned. `keep_local` must be called afterwards.

        Args:
            groups: the parameters of each group, as hooks see them.
            known: the parameters of the whole module, by the id of the object that hooks see.
        """
        self.whole = tuple(tuple(known[id(p)][0] for p in group) for group in groups)
        self._parameters = [[known[id(p)][1] for p in group] for group in groups]
        self._given_names = [list(group.get("param_names", ())) for group in self.optimizer.param_groups]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters on this rank, over all groups."""
        return tuple(name for group in self.local for name in group)

    def whole_state(self, local: Mapping[str, Any], states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the `state_dict` that a single process would have.

        Args:
            local: the `state_dict` of this rank.
            states: the results of `states_by_name` of all ranks.
        """
        if not local:
            return {}
        by_name = {name: state for states_of_rank in states for name, state in states_of_rank.items()}
        return number_state_dict(by_name, self.named_state(local)["param_groups"])

    def named_state(self, local: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `state_dict` of this rank with the names of parameters instead of their numbers.

        The groups contain the names of the parameters of all ranks.
        """
        groups = []
        for settings, names in zip(local.get("param_groups", ()), self.whole, strict=True):
            group = {**settings, "params": list(names)}
            if "param_names" in settings:
                group["param_names"] = list(names)
            groups.append(group)
        return {"state": self.states_by_name(local), "param_groups": groups}

    def states_by_name(self, local: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states in the `state_dict` of this rank by the names of the parameters."""
        names = self.names
        return {names[number]: state for number, state in local.get("state", {}).items()}

    def local_state(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of the `state_dict` of a single process.

        Raises:
            PipelineError: the `state_dict` was written for other parameter groups.
        """
        if not self.whole:
            return {"state": {}, "param_groups": []}
        numbers: dict[str, int] = {}
        if len(whole.get("param_groups", ())) != len(self.whole):
            raise PipelineError(
                f"the checkpoint's optimizer has {len(whole.get('param_groups', ()))} parameter groups, this one "
                f"{len(self.whole)}; resume with the configure_optimizers that wrote it"
            )
        for number, (group, names) in enumerate(zip(whole["param_groups"], self.whole, strict=True)):
            if len(group["params"]) != len(names):
                raise PipelineError(
                    f"parameter group {number} of the checkpoint's optimizer has {len(group['params'])} parameters, "
                    f"this one {len(names)}; resume with the model and configure_optimizers that wrote it"
                )
            numbers.update(zip(names, group["params"], strict=True))
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        at = 0
        for settings, names in zip(whole["param_groups"], self.local, strict=True):
            for offset, name in enumerate(names):
                if numbers[name] in whole["state"]:
                    state[at + offset] = whole["state"][numbers[name]]
            group = {**settings, "params": list(range(at, at + len(names)))}
            if "param_names" in settings:
                group["param_names"] = list(names)
            groups.append(group)
            at += len(names)
        return {"state": state, "param_groups": groups}


class WholeStates(MutableMapping[Any, Any]):
    """The states of an optimizer for the parameters of all ranks, in the order of a single process.

    The state of a parameter on another rank is created when it is first accessed. It has the same entries as the state
    of a similar parameter on this rank, but its tensors have no values.

    Args:
        own: the states of this rank.
        groups: the parameters of all ranks, by group.
        check: called with a parameter before user code reads, writes or looks up its state, and with None before user
            code iterates over all states. It raises PipelineError if a single process would have another state at this
            time.
    """

    def __init__(
        self,
        own: MutableMapping[Any, Any],
        groups: Sequence[Sequence[torch.Tensor]],
        check: Callable[[torch.Tensor | None], None],
    ) -> None:
        self.own = own
        self._groups = groups
        self._check = check
        self._made: dict[torch.Tensor, Any] = {}
        self._deleted: set[torch.Tensor] = set()
        self._number: dict[Any, int] = {}  # the number of the group of each parameter on another rank
        self._likes: dict[Any, torch.Tensor] = {}  # local parameters with states, by group and shape, and by group

    def __getitem__(self, key: Any) -> Any:
        key = RemoteTensor.find_stand_in(key) if isinstance(key, torch.Tensor) else key
        if not isinstance(key, RemoteTensor):
            self._check(key)
            return self.own[key]
        if key not in self._made:
            like = None if key in self._deleted else self._find_like(key)
            self._made[key] = {} if like is None else _state_on_other_rank(key, self.own[like], like)
        return self._made[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, RemoteTensor):
            self._made[RemoteTensor.find_stand_in(key)] = value
        else:
            self._check(key)
            self.own[key] = value

    def __delitem__(self, key: Any) -> None:
        if isinstance(key, RemoteTensor):
            self._deleted.add(RemoteTensor.find_stand_in(key))
            self._made.pop(RemoteTensor.find_stand_in(key), None)
        else:
            self._check(key)
            del self.own[key]
            self._likes.clear()

    def __contains__(self, key: Any) -> bool:
        self._check(key)
        if not isinstance(key, RemoteTensor):
            return key in self.own
        key = RemoteTensor.find_stand_in(key)
        return key in self._made or (key not in self._deleted and self._find_like(key) is not None)

    def __iter__(self) -> Iterator[Any]:
        self._check(None)
        parameters = [p for group in self._groups for p in group]
        remote = [p for p in parameters if isinstance(p, RemoteTensor)]
        if remote and len(remote) == len(parameters):
            remote[0].refuse_use("iterates over the states of an optimizer, such as the state of")
        known = set(parameters)
        return iter([*(p for p in parameters if p in self), *(key for key in self.own if key not in known)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter, or `default` if it has none. No state is created."""
        return self[key] if key in self else default  # noqa: SIM401  # `self.get` would recurse

    def clear(self) -> None:
        """Remove all states."""
        self._check(None)
        self.own.clear()
        self._made.clear()
        self._likes.clear()

    def _find_like(self, key: RemoteTensor) -> torch.Tensor | None:
        """Return a parameter of this rank that has a state, preferably one of the same group and shape."""
        if not self._likes:
            for number, group in enumerate(self._groups):
                for p in group:
                    if isinstance(p, RemoteTensor):
                        self._number[p] = number
                    elif p in self.own:
                        for place in ((number, p.shape), number, None):
                            self._likes.setdefault(place, p)
        at = self._number.get(key)
        found = (self._likes.get(place) for place in ((at, key.shape), at, None))
        return next((p for p in found if p is not None), None) if key.requires_grad else None


def _state_on_other_rank(key: RemoteTensor, state: Any, of: torch.Tensor) -> Any:
    """Return a state for `key` with the entries of `state`, the state of the parameter `of`, but without values."""

    def make(name: Any, value: torch.Tensor) -> RemoteTensor:
        shape = key.shape if value.shape == of.shape else value.shape
        like = torch.empty(shape, dtype=value.dtype, device="meta")
        return key.derive(like, f"an optimizer's {name!r} of")

    entries = state if isinstance(state, dict) else {"state": state}
    made = {name: pytree.tree_map_only(torch.Tensor, partial(make, name), value) for name, value in entries.items()}
    return made if isinstance(state, dict) else made["state"]


class OptimizersView:
    """Shows user code the parameters of all ranks in optimizers, while all other code sees the parameters of this rank.

    Args:
        layouts: the layouts of all optimizers.
        scope: specifies which hook is running. Its `view` is this object until `patches` is closed.
        patches: the changes that are reverted when it is closed.
        why_not: returns the reason why user code can't access the state of a parameter now, or an empty string if it
            can. None in place of a parameter stands for the states of all parameters.
        parameters: returns the parameters that a hook may add to an optimizer, by the id of the object that hooks see.
        adopt: called after a hook has changed the groups of optimizers.
    """

    def __init__(
        self,
        layouts: Sequence[OptimizerLayout],
        scope: HookScope,
        patches: Patches,
        why_not: Callable[[torch.Tensor | None], str],
        parameters: Callable[[], Mapping[int, NamedParameter]],
        adopt: Callable[[], None],
    ) -> None:
        self._layouts = layouts
        self._scope = scope
        self._why_not = why_not
        self._parameters = parameters
        self._adopt = adopt
        self._whole = False
        scope.view = self
        patches.callback(setattr, scope, "view", no_view)

    @contextmanager
    def __call__(self, whole: bool) -> Iterator[None]:
        """Put the parameters of all ranks (`whole`) or of this rank into the optimizers while the block runs.

        Raises:
            PipelineError: a hook has changed the parameters of an optimizer, but not all ranks run this hook, or the
                new parameters are not among `parameters`.
        """
        if whole == self._whole:
            yield
            return
        self._show(whole)
        try:
            yield
        except BaseException:
            with suppress(PipelineError):
                self._show(not whole)
            raise
        self._show(not whole)

    def _show(self, whole: bool) -> None:
        self._whole = whole
        if whole:
            for layout in self._layouts:
                layout.show_whole(self._check)
            return
        shown = [(layout, layout.show_local()) for layout in self._layouts]  # for all, before an error
        changed = [(layout, groups) for layout, groups in shown if groups is not None]
        if not changed:
            return
        known = self._parameters() if self._scope.on_all_ranks else {}
        if not all(id(p) in known for _, groups in changed for p in chain(*groups)):
            raise PipelineError(
                f"{self._scope.hook} changes which parameters an optimizer has, as add_param_group does. It can give "
                "it parameters of the module, in a hook that all ranks run, with a schedule that flushes between "
                "batches. Or give configure_optimizers all parameters that are trained at any time: a group can begin "
                "with lr=0, and requires_grad_(False) leaves parameters out"
            )
        for layout, groups in changed:
            layout.take_groups(groups, known)
        self._adopt()

    def _check(self, parameter: torch.Tensor | None) -> None:
        why = self._why_not(parameter)
        if why:
            raise PipelineError(f"{self._scope.hook} accesses optimizer.state{why}")


def number_state_dict(states: Mapping[str, Any], named_groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the `state_dict` of an optimizer on a single process.

    Args:
        states: the states by the names of the parameters.
        named_groups: the parameter groups, with the names of the parameters instead of their numbers.
    """
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group in named_groups:
        numbers = list(range(number, number + len(group["params"])))
        number += len(numbers)
        state.update({n: states[name] for n, name in zip(numbers, group["params"], strict=True) if name in states})
        groups.append({**group, "params": numbers})
    return {"state": state, "param_groups": groups}


def parameter_names(module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> list[Groups]:
    """Return the names of the parameters of each optimizer. Parameters that are not in the module are numbered."""
    names = {id(p): name for name, p in module.named_parameters()}
    return [
        tuple(
            tuple(names.get(id(p), f"optimizer {o}, group {g}, {k}") for k, p in enumerate(group["params"]))
            for g, group in enumerate(optimizer.param_groups)
        )
        for o, optimizer in enumerate(optimizers)
    ]


def refuse_unsuitable(optimizers: Sequence[Optimizer]) -> None:
    """Raise PipelineError for optimizers that run the training step more than once per update."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise PipelineError(
                "LBFGS runs training_step several times per update and searches along the whole gradient, which is "
                "spread over ranks; use an optimizer that takes one step per batch"
            )


def settings_of(optimizers: Iterable[Optimizer]) -> dict[str, str]:
    """Return the plain settings of the optimizers as text, such as numbers, strings and flags.

    The keys consist of the class and the number of the optimizer, the number of the group, and the name of the setting.
    """
    found = {}
    for n, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            where = f"{type(optimizer).__name__} {n}, group {g}, "
            found.update({where + key: repr(value) for key, value in group.items() if _is_plain(value)})
    return found


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    return value is None or isinstance(value, (bool, int, float, str))


def check_same_settings(settings: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> None:
    """Raise PipelineError unless the optimizers of all ranks have the same settings."""
    for where in dict.fromkeys(key for each in settings for key in each):
        found = [each.get(where, "nothing") for each in settings]
        if len(set(found)) > 1:
            listed = ", ".join(f"{value} on rank {rank}" for rank, value in zip(ranks, found, strict=True))
            raise PipelineError(
                f"the optimizers of one pipeline differ: {where} is {listed}. Stages would be trained with different "
                "settings. Derive the settings from values that are the same on all ranks, and give a job array its "
                "jobs in the same order on every rank"
            )
