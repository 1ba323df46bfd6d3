"""All private names of torch that the engine and the layers above it use, except a few that a test lists with a reason.

Each name is checked by a test, so that the test reports the name if a new version of torch renames or changes it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import debug_unwrap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad
from torch.optim import swa_utils
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

if TYPE_CHECKING:  # the import takes half a second
    from torch.distributed.fsdp import FSDPModule

FunctionNode: type[Any] = torch._C._FunctionBase
"""The class of the nodes that autograd functions in Python create in the graph."""
ReentrantCheckpoint: type[Any] = CheckpointFunction
"""The autograd function of a reentrant checkpoint."""
CheckpointNode: type[Any] = CheckpointFunction._backward_cls
"""The class of the nodes that reentrant checkpoints create in the graph."""
NoSubclassFunctions: Any = torch._C.DisableTorchFunctionSubclass
"""A context in which functions don't call `__torch_function__` of tensor subclasses."""
NoFunctionModes: Any = torch._C.DisableTorchFunction
"""A context in which functions call neither a TorchFunctionMode nor `__torch_function__` of tensor subclasses."""
BatchNorm = _BatchNorm
"""The base class of batch normalization with any number of dimensions."""
set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)
"""Sets the numbers of in-place changes of tensors, as counted by torch."""


def make_copy_on_write(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that uses the memory of another one until either of them is written.

    Args:
        tensor: a tensor that does not require a gradient.

    Raises:
        RuntimeError: torch has not allocated the memory of the tensor.
    """
    return torch._lazy_clone(tensor)


def is_copy_on_write(tensor: torch.Tensor) -> bool:
    """Return whether a write to the tensor would first give it separate memory."""
    return bool(torch._C._is_cow_tensor(tensor))  # type: ignore[attr-defined]


def shield_copies_on_write(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict that can be saved or sent without giving copies on write of the module separate memory.

    Saving reads tensors in a way that counts as a write. The entries are therefore further copies on write. Entries
    that shared a storage, such as tied weights, still do.
    """
    made: dict[int, torch.Tensor] = {}
    shielded = dict(state)
    for key, value in state.items():
        if type(value) not in (torch.Tensor, nn.Parameter) or value.is_meta or not is_copy_on_write(value):
            continue
        one = made.setdefault(value.untyped_storage()._cdata, make_copy_on_write(value.detach()))
        shielded[key] = one.as_strided(value.size(), value.stride(), value.storage_offset())
    return shielded


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address at which the memory of a tensor begins, without giving a copy on write separate memory."""
    address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return address


def run_backward(roots: Sequence[torch.Tensor | GradientEdge], gradients: Sequence[torch.Tensor]) -> None:
    """Run the last part of `torch.autograd.backward`, without the checks that precede it.

    These checks take longer than the backward of a small graph. The function works only on the CPU. On other devices
    backward runs in threads, for which `torch.autograd.backward` makes further preparations.
    """
    backward: Any = Variable._execution_engine.run_backward
    backward(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


BackwardCheck = Callable[[Sequence[torch.Tensor], Sequence[Any]], None]


class _BackwardChecks(threading.local):
    check: BackwardCheck | None = None


_backward_checks = _BackwardChecks()
_of_autograd: Any = torch.autograd
_start_backward = _of_autograd._engine_run_backward


def check_backward(check: BackwardCheck | None) -> None:
    """Call `check` before each backward that Python code of this thread starts. If `check` is None, the calls end.

    Args:
        check: called with the tensors where the backward starts, and the tensors whose gradients are requested; the
            latter are empty for `backward()`.
    """
    _of_autograd._engine_run_backward = _start_checked_backward
    _backward_checks.check = check


def _start_checked_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    if _backward_checks.check is not None:
        _backward_checks.check(outputs, args[3])
    return _start_backward(outputs, *args, **kwargs)


def graph_nodes(tensors: Iterable[Any]) -> list[Any]:
    """Return the nodes of the graph that have produced these tensors or edges.

    Tensors inside a transform of torch.func are left out, because their graph ends with the transform.
    """
    edges = (t if isinstance(t, GradientEdge) else get_gradient_edge(t) for t in tensors if _has_graph(t))
    return [edge.node for edge in edges]


def _has_graph(tensor: Any) -> bool:
    if isinstance(tensor, GradientEdge):
        return True
    return bool(tensor.requires_grad) and tensor is debug_unwrap(tensor, recurse=False)


def is_reached(starts: Iterable[Any], targets: Iterable[Any]) -> bool:
    """Return whether a backward that starts at some nodes of the graph reaches one of the `targets`."""
    wanted, seen, left = set(targets), set[Any](), list(starts)
    while left and wanted:
        node = left.pop()
        if node in wanted:
            return True
        if node not in seen:
            seen.add(node)
            left += [after for after, _ in node.next_functions if after is not None]
    return False


def like_root(root: torch.Tensor | GradientEdge) -> Any:
    """Return an object with the shape, dtype and device of the tensor where a backward starts."""
    return root.node._input_metadata[root.output_nr] if isinstance(root, GradientEdge) else root


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a hook for the gradient of a tensor is registered."""
    return bool(tensor._backward_hooks)


def has_accumulate_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a hook is registered that runs after the gradient of a tensor was added to `grad`."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def gradient_hooks(tensor: torch.Tensor) -> dict[int, Any]:
    """Return the hooks for the gradient of a tensor. If there are any, the result can be used to change them."""
    return tensor._backward_hooks or {}


def accumulate_hooks(tensor: torch.Tensor) -> dict[int, Any]:
    """Return the hooks that run after the gradient of a tensor was added to `grad`.

    If there are any, the result can be used to change them.
    """
    return getattr(tensor, "_post_accumulate_grad_hooks", None) or {}


def with_hooks(parameters: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    """Return the parameters with gradient hooks, and the parameters with hooks that run after accumulation."""
    found: Any = parameters
    return [p for p in found if p._backward_hooks], [p for p in found if p._post_accumulate_grad_hooks]


def saved_tensors(node: Any) -> Iterator[Any]:
    """Yield the tensors that a node of the graph has saved for its backward."""
    for name in _saved_names(type(node)):  # type: ignore[arg-type]
        value = getattr(node, name)
        if isinstance(value, (tuple, list)):
            yield from value
        else:
            yield value


@cache
def _saved_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


class Clipping:
    """The functions of torch that clip lists of gradients, under all names by which users have imported them.

    `clip_grad_norm_` consists of the first two functions.
    """

    NORM = "_get_total_norm"
    BY_NORM = "_clip_grads_with_norm_"
    BY_VALUE = "clip_grad_value_"
    WHOLE = "clip_grad_norm_"

    @classmethod
    def around(cls, name: str, function: Callable[..., Any]) -> Callable[[], None]:
        """Call `function(original, *args, **kwargs)` instead of the function with this name.

        Returns:
            A function that undoes the replacement. Several replacements can be undone in any order.
        """
        layers = _layers(name)
        layers.append(function)
        return partial(layers.remove, function)


@cache
def _layers(name: str) -> list[Callable[..., Any]]:
    """Return the functions that wrap a function of `clip_grad`.

    Torch wraps each of its functions to run it without gradients. The cell of this wrapper holds the function itself,
    and its content is replaced here, because names that were imported earlier refer to the wrapper.
    """
    (cell,) = getattr(clip_grad, name).__closure__
    original, layers = cell.cell_contents, list[Callable[..., Any]]()

    def run(*args: Any, **kwargs: Any) -> Any:
        function = original
        for layer in layers:
            function = partial(layer, function)
        return function(*args, **kwargs)

    cell.cell_contents = run
    return layers


def forward_hooks(module: nn.Module) -> list[Any]:
    """Return all forward hooks of a module, including pre-hooks."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def select_hooked(modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the keys of the modules that have backward hooks."""
    return {key for key, module in modules.items() if module._backward_hooks or module._backward_pre_hooks}


def backward_hooks(module: nn.Module) -> list[Any]:
    """Return all backward hooks of a module, including pre-hooks."""
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


@contextmanager
def without_weak_references(module: nn.Module) -> Iterator[None]:
    """Remove the weak references of a recurrent module to its weights inside the block, so that they can be swapped."""
    recurrent: Any = module if isinstance(module, nn.RNNBase) else None
    if recurrent is not None:
        recurrent._flat_weight_refs = []
    yield
    if recurrent is not None:
        recurrent._init_flat_weights()


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of the buffers of a module, without its children, that its state dict does not contain."""
    return module._non_persistent_buffers_set


def argument_names(operation: Any) -> list[str]:
    """Return the names of the arguments of an operation of torch, such as `aten.dropout.default`."""
    return [argument.name for argument in operation._schema.arguments]


def works_in_place(operation: Any) -> bool:
    """Return whether an operation of torch writes to its first argument and returns it."""
    return bool(operation._schema.is_mutable and operation.__name__.partition(".")[0].endswith("_"))


def list_changed_arguments(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation of torch, such as `aten.normal_.default`, changes in place."""
    if not operation._schema.is_mutable:
        return []
    arguments = operation._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | {**kwargs}
    changed = [given.get(each.name) for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    listed = (each if isinstance(each, (list, tuple)) else [each] for each in changed)
    return [t for each in listed for t in each if isinstance(t, torch.Tensor)]


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks that run before and after the step of an optimizer."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def in_functorch() -> bool:
    """Return whether a transform of torch.func, such as vmap, is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether the values of a tensor are in memory. The zeros of forward-mode autograd, for example, are not."""
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor._is_zerotensor()


@contextmanager
def allow_transforms() -> Iterator[None]:
    """Let transforms of torch.func, which refuse hooks of saved tensors, run inside the block without these hooks."""
    graph: Any = torch.autograd.graph
    before = graph.disable_saved_tensors_hooks

    @contextmanager
    def disable(message: str) -> Iterator[None]:
        hooks: Any = torch._C._autograd
        with ExitStack() as stack:
            disabled_before = hooks._saved_tensors_hooks_get_disabled_error_message()
            if disabled_before is None:
                stack.callback(hooks._saved_tensors_hooks_enable)
            else:
                stack.callback(hooks._saved_tensors_hooks_disable, disabled_before, False)
            hooks._saved_tensors_hooks_disable(message, False)
            yield

    graph.disable_saved_tensors_hooks = disable
    try:
        yield
    finally:
        graph.disable_saved_tensors_hooks = before


pop_function_mode = torch._C._pop_torch_function_stack
"""Removes the TorchFunctionMode that is called before all others, and returns it."""
push_function_mode = torch._C._push_on_torch_function_stack
"""Adds a TorchFunctionMode that is called before all others, without entering it."""


def replace_checkpoints(make: Any) -> Any:
    """Set the function that returns the generator around the block of a non-reentrant checkpoint.

    Returns:
        The previous function.
    """
    before = checkpoint._checkpoint_without_reentrant_generator
    checkpoint._checkpoint_without_reentrant_generator = make
    return before


def has_composable_checkpoint(module: nn.Module) -> bool:
    """Return whether `torch.distributed._composable.checkpoint` was applied to the module itself."""
    library: Any = sys.modules.get("torch.distributed._composable.contract")
    return library is not None and "checkpoint" in (library._get_registry(module) or ())


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that is the same for all tensors with the same memory, even if they have no values."""
    return int(tensor.untyped_storage()._cdata)


def count_python_references(tensor: Any) -> int:
    """Return the number of Python references of the caller to a tensor."""
    return sys.getrefcount(tensor) - _OF_CALL - (_HELD_BY_GRAPH if tensor._use_count() > 1 else 0)


def _measure_references() -> tuple[int, int]:
    """Return the number of references of a call, and whether all references in C++ code are counted as one."""

    def count(tensor: torch.Tensor) -> int:
        return sys.getrefcount(tensor)

    table = {0: torch.ones((), requires_grad=True) * 1}
    alone = count(table[0])
    product = table[0] * table[0]  # the graph node of the product refers to its factors
    held = count(table[0])
    del product
    return alone - 1, held - alone


_OF_CALL, _HELD_BY_GRAPH = _measure_references()


def is_fully_sharded(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Return whether `fully_shard` was applied to the module itself."""
    return hasattr(module, "_get_fsdp_state")  # importing its class takes long


def finish_sharded_backward(module: FSDPModule) -> None:
    """Reduce gradients and reshard weights after a backward, if the hooks of FSDP2 have not done so.

    These hooks miss a backward that does not start at the outputs of the module, such as a backward for weights only.
    """
    state = module._get_fsdp_state()
    if state._is_root and any(not g.is_sharded for s in state._state_ctx.all_states for g in s._fsdp_param_groups):
        state._root_post_backward_final_callback()


def managed_parameters(module: FSDPModule) -> Iterator[tuple[nn.Module, str, int]]:
    """Yield the parameters that `fully_shard` has grouped into one unit for this module.

    Each parameter is given by its owner, its name in the owner, and a number. The number is the same for all parameters
    that were one parameter before.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            info = parameter._module_info
            yield info.module, info.param_name, parameter._orig_param_uid


def forget_shards(module: FSDPModule) -> None:
    """Free the shards that FSDP2 stores for a module that will not run."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter._sharded_param_data = torch.empty(0)


def remove_fully_shard(module: FSDPModule, unshard: Callable[[torch.Tensor], nn.Parameter]) -> None:
    """Undo `fully_shard` for one module.

    Args:
        module: the module.
        unshard: returns the whole parameter for a shard.
    """
    state = module._get_fsdp_state()
    for group in state._fsdp_param_groups:
        group.reshard()
        for parameter in group.fsdp_params:
            parameter._post_load_hook_handle.remove()
            whole, info = unshard(parameter.sharded_param), parameter._module_info
            owners = [(info.module, info.param_name)]
            owners += zip(info.shared_modules, info.shared_param_names, strict=True)
            for owner, name in owners:
                owner._parameters[name] = whole
    state._fsdp_param_groups.clear()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    module.__class__ = type(module).__mro__[module._orig_cls_mro_index]


@contextmanager
def averages_one_by_one() -> Iterator[None]:
    """Make `AveragedModel` pass the tensors one by one to functions that accept several tensors."""
    before = swa_utils._group_tensors_by_device_and_dtype  # type: ignore[attr-defined]

    def group_alone(lists: list[list[torch.Tensor]], *_: Any) -> dict[Any, Any]:
        of_numbers = enumerate(zip(*lists, strict=True))
        return {(tensors[0].device, number): ([[t] for t in tensors], [number]) for number, tensors in of_numbers}

    swa_utils._group_tensors_by_device_and_dtype = group_alone  # type: ignore[attr-defined,assignment]
    try:
        yield
    finally:
        swa_utils._group_tensors_by_device_and_dtype = before  # type: ignore[attr-defined]


def silence_store_warnings() -> None:
    """Prevent torch's store from printing C++ calls when its host has ended, because one line reports this already.

    Torch reads the level of this log from TORCH_CPP_LOG_LEVEL when it is imported. If the variable is set in the
    environment, the level is not changed.
    """
    if "TORCH_CPP_LOG_LEVEL" in os.environ or not sys.platform.startswith("linux"):
        return
    with suppress(OSError, ValueError):  # another build of torch
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
        level.value = max(level.value, _ERROR_LEVEL)


_ERROR_LEVEL = 2
"""The number of ERROR in the C++ log of torch; WARNING is 1."""


def is_imported_by_worker() -> bool:
    """Return whether this process was spawned by another one, for example a DataLoader, and is importing its script."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))
