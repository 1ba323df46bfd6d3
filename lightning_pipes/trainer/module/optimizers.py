"""Optimizers: configured by the user for the whole module, then reduced to what lives on this rank."""

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
from lightning_pipes.trainer.module.remote_tensors import HookScope, RemoteTensor, no_view
from lightning_pipes.trainer.patches import Patches

Groups = tuple[tuple[str, ...], ...]
"""Parameter names by group, in the optimizer's order."""
NamedParameter = tuple[str, torch.Tensor]
"""A parameter with its name in the whole module."""


def check_momentum(optimizers: Iterable[Optimizer], schedule: str) -> None:
    """Refuse optimizers without momentum, and others with updates that can't be predicted.

    Raises:
        PipelineError: one has no momentum, or is none that `predict_change` knows.
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
    """Return the change of a parameter by the next update if its momentum stays; None before the first one.

    Decay of weights is left out.
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
    """Which parameters an optimizer has: on one process, and on this rank.

    State is written with the numbering of one process and read back with it, whatever the number of stages. Where
    configure_optimizers returns None, Lightning's stand-in for an optimizer has no groups, and an empty `state_dict`.

    Args:
        optimizer: made for the whole module.
        whole: names of its parameters.

    Attributes:
        local: names of those that it has now.
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
        """Restrict the optimizer to parameters of this rank; states of other parameters are dropped.

        Groups stay, also when they get empty, so that schedulers and learning rates are the same on every rank.
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
        """Have the optimizer show the parameters of all ranks, the very objects that the module shows in hooks.

        Args:
            check: of `WholeStates`.
        """
        self._hidden = [group["params"] for group in self.optimizer.param_groups]
        self._shown = [list(map(RemoteTensor.find_stand_in, parameters)) for parameters in self._parameters]
        self._whole = [list(parameters) for parameters in self._shown]
        self.optimizer.state = WholeStates(self.optimizer.state, self._whole, check)  # type: ignore[assignment]
        for group, parameters in zip(self.optimizer.param_groups, self._shown, strict=True):
            group["params"] = parameters

    def show_local(self) -> list[list[torch.Tensor]] | None:
        """Show the parameters of this rank in the optimizer again; return the shown groups where they have changed."""
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
        else:  # code of the user's has put another one there
            for key in [key for key in self.optimizer.state if isinstance(key, RemoteTensor)]:
                del self.optimizer.state[key]
        return None if same else now

    def take_groups(self, groups: Sequence[Sequence[torch.Tensor]], known: Mapping[int, NamedParameter]) -> None:
        """Take other groups, as `show_local` has given them; call `keep_local` then.

        Args:
            known: parameters of the whole module, by the id of what hooks see of each.
        """
        self.whole = tuple(tuple(known[id(p)][0] for p in group) for group in groups)
        self._parameters = [[known[id(p)][1] for p in group] for group in groups]
        self._given_names = [list(group.get("param_names", ())) for group in self.optimizer.param_groups]

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters of this rank."""
        return tuple(name for group in self.local for name in group)

    def whole_state(self, local: Mapping[str, Any], states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return one process's `state_dict`, from that of this rank and the `states_by_name` of all ranks."""
        if not local:
            return {}
        by_name = {name: state for states_of_rank in states for name, state in states_of_rank.items()}
        return number_state_dict(by_name, self.named_state(local)["param_groups"])

    def named_state(self, local: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's `state_dict` with names in place of numbers; groups have the names of all ranks'
        parameters."""
        groups = []
        for settings, names in zip(local.get("param_groups", ()), self.whole, strict=True):
            group = {**settings, "params": list(names)}
            if "param_names" in settings:
                group["param_names"] = list(names)
            groups.append(group)
        return {"state": self.states_by_name(local), "param_groups": groups}

    def states_by_name(self, local: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states in this rank's `state_dict`, by parameter name."""
        names = self.names
        return {names[number]: state for number, state in local.get("state", {}).items()}

    def local_state(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of one process's `state_dict`.

        Raises:
            PipelineError: it was written for other parameter groups.
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
    """The states that an optimizer has for the parameters of all ranks, in the order of one process.

    States of parameters on other ranks are made when they are asked for. They are like those of a parameter here, and
    their tensors have no values.

    Args:
        own: the states of this rank.
        groups: the parameters of all ranks, by group.
        check: called before code of the user's gets, sets or looks for the state of a parameter, or goes through all
            states, which is None; raises PipelineError where one process would find another one.
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
        self._number: dict[Any, int] = {}  # of the group of each parameter on another rank
        self._likes: dict[Any, torch.Tensor] = {}  # parameters here that have states, by group and shape, by group

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
            remote[0].refuse_use("goes through the states of an optimizer, such as that of")
        known = set(parameters)
        return iter([*(p for p in parameters if p in self), *(key for key in self.own if key not in known)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a state, and make none."""
        return self[key] if key in self else default  # noqa: SIM401  # this is what it is made of

    def clear(self) -> None:
        """Forget all states."""
        self._check(None)
        self.own.clear()
        self._made.clear()
        self._likes.clear()

    def _find_like(self, key: RemoteTensor) -> torch.Tensor | None:
        """Return a parameter here that has a state; of the same group and shape if there is one."""
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
    """Return a state of `key` with the entries that the state of the parameter `of` has."""

    def make(name: Any, value: torch.Tensor) -> RemoteTensor:
        shape = key.shape if value.shape == of.shape else value.shape
        like = torch.empty(shape, dtype=value.dtype, device="meta")
        return key.derive(like, f"an optimizer's {name!r} of")

    entries = state if isinstance(state, dict) else {"state": state}
    made = {name: pytree.tree_map_only(torch.Tensor, partial(make, name), value) for name, value in entries.items()}
    return made if isinstance(state, dict) else made["state"]


class OptimizersView:
    """Shows the user's code the parameters of all ranks in optimizers. Other code sees those of this rank.

    Args:
        scope: says which hook runs; its `view` is this object until `patches` are closed.
        why_not: returns why code of the user's can't have the state of a parameter now, or those of all, which is None;
            empty where it can.
        parameters: returns those that a hook may give an optimizer, by the id of what hooks see of each.
        adopt: called when a hook has given optimizers other groups.
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
        """Show the parameters of all ranks, or of this one, in optimizers for the block.

        Raises:
            PipelineError: code of the user's has changed which parameters an optimizer has.
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
        shown = [(layout, layout.show_local()) for layout in self._layouts]  # of all, before anything is raised
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
            raise PipelineError(f"{self._scope.hook} looks into optimizer.state{why}")


def number_state_dict(states: Mapping[str, Any], named_groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one process's `state_dict` of an optimizer, from states by parameter name and groups of names."""
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
    """For each optimizer the names of its parameters; those that are not the module's are numbered."""
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
    """Return the numbers, words and flags that the optimizers were made with, in words, by where they stand."""
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
                f"the optimizers of one pipeline differ: {where} is {listed}. Stages would be trained by different "
                "settings; take them from what is the same on all ranks, and give a job array its jobs in one order"
            )
