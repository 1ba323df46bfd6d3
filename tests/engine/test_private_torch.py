"""One test for each private name of torch that the engine and the packages above it use."""

from __future__ import annotations

import ctypes
import inspect
import multiprocessing
import multiprocessing.spawn
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from lightning_pipes.engine import private_torch as private
from lightning_pipes.testing.ranks import run_ranks


def test_function_base():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 2 * gradient

    x = torch.ones(1, requires_grad=True)
    assert isinstance(Twice.apply(x).grad_fn, private.FunctionNode)
    assert not isinstance((2 * x).grad_fn, private.FunctionNode)


@pytest.mark.parametrize("rooted", [lambda out: out, get_gradient_edge])
def test_execution_engine_run_backward(rooted):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    private.run_backward([rooted(x * x), rooted(3 * x)], [torch.tensor([1.0, 10.0]), torch.ones(2)])
    assert x.grad.tolist() == [5.0, 43.0]


def test_engine_run_backward():
    """`grad()` and `backward()` call a function of their module's namespace, with the inputs as fourth argument."""
    x = torch.ones(2, requires_grad=True)
    seen = list[Any]()
    private.check_backward(lambda outputs, inputs: seen.append((outputs, inputs)))
    try:
        y = (2 * x).sum()
        (g,) = torch.autograd.grad(y, x, retain_graph=True)
        y.backward()
    finally:
        private.check_backward(None)
    (3 * x).sum().backward()
    assert seen == [((y,), (x,)), ((y,), ())]
    assert g.tolist() == [2, 2]
    assert x.grad is not None
    assert x.grad.tolist() == [5, 5]


def test_next_functions():
    x, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    inner = x * 2
    nodes = private.graph_nodes
    assert private.is_reached(nodes([inner.sum() + other.sum()]), nodes([other]))
    assert private.is_reached(nodes([inner]), nodes([x]))
    assert private.is_reached(nodes([inner]), nodes([inner]))
    assert not private.is_reached(nodes([inner]), nodes([other, inner.sum()]))
    assert not private.is_reached(nodes([inner.detach()]), nodes([x]))


def test_input_metadata():
    out = torch.ones(2, 3, dtype=torch.float64, requires_grad=True).exp()
    for like in (private.like_root(out), private.like_root(get_gradient_edge(out))):
        assert (tuple(like.shape), like.dtype, like.device) == ((2, 3), torch.float64, torch.device("cpu"))


def test_checkpoint_function_backward_cls():
    x = torch.ones(1, requires_grad=True)
    assert isinstance(checkpoint(torch.sin, x, use_reentrant=True).grad_fn, private.CheckpointNode)
    assert not isinstance(checkpoint(torch.sin, x, use_reentrant=False).grad_fn, private.CheckpointNode)


def test_composable_checkpoint() -> None:
    from torch.distributed._composable import checkpoint as compose

    module = compose(torch.nn.Linear(2, 2))
    assert private.has_composable_checkpoint(module)
    assert not private.has_composable_checkpoint(torch.nn.Linear(2, 2))


def test_functions_leave_out_subclasses():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args, **kwargs):
            raise AssertionError("reached")

    loud = torch.ones(2).as_subclass(Loud)
    with private.NoSubclassFunctions():
        assert loud.requires_grad_(True).requires_grad
    with pytest.raises(AssertionError, match="reached"):
        loud.requires_grad_(False)


def test_functions_leave_out_modes():
    seen = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Seen(), private.NoFunctionModes():
        torch.ones(2).detach()
    assert seen == []


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_batch_norm(kind):
    assert issubclass(kind, private.BatchNorm)
    assert not issubclass(nn.LayerNorm, private.BatchNorm)


def test_torch_dispatch_mode():
    seen = []

    class Seen(private.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Seen():
        torch.zeros(2)
    assert seen


def test_backward_hooks():
    weight = nn.Parameter(torch.ones(2))
    assert not private.has_gradient_hooks(weight)
    handle = weight.register_hook(lambda gradient: None)
    assert private.has_gradient_hooks(weight)
    handle.remove()
    assert not private.has_gradient_hooks(weight)


def test_select_hooked():
    layers = {name: nn.Linear(1, 1) for name in ("full", "before", "none")}
    layers["full"].register_full_backward_hook(lambda *_: None)
    layers["before"].register_full_backward_pre_hook(lambda *_: None)
    assert private.select_hooked(layers) == {"full", "before"}


def test_post_accumulate_grad_hooks():
    weight = nn.Parameter(torch.ones(2))
    assert not private.has_accumulate_hooks(weight)
    weight.register_post_accumulate_grad_hook(lambda p: None)
    assert private.has_accumulate_hooks(weight)


def test_raw_saved():
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    (saved,) = private.saved_tensors(y.grad_fn)
    assert torch.equal(saved.data, y)
    assert saved.unpack_hook is None


def test_forward_hooks():
    module = nn.Linear(2, 2)
    assert private.forward_hooks(module) == []
    hooks: list[Any] = [lambda *_: None, lambda *_: None]
    module.register_forward_pre_hook(hooks[0])
    module.register_forward_hook(hooks[1])
    assert set(private.forward_hooks(module)) == set(hooks)


def test_tensors_without_values():
    """Fake tensors can be mixed with real tensors, share storage between views, and have no value for `item()`."""
    real = torch.ones(2, 3)
    with private.FakeTensorMode(allow_non_fake_inputs=True):
        made = real @ torch.empty_strided((3, 4), (4, 1))
    assert isinstance(made, private.FakeTensor)
    assert not isinstance(real, private.FakeTensor)
    assert made.device == real.device
    assert private.storage_key(made) == private.storage_key(made.view(8)) != private.storage_key(made + 1)
    with pytest.raises(RuntimeError):
        (made + real.sum()).sum().item()


def test_flat_weight_refs():
    """Recurrent modules store weak references to their weights, which prevent swapping until they are removed."""
    part = nn.LSTM(2, 3)
    other = nn.Parameter(torch.zeros_like(part.weight_hh_l0))
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(part.weight_hh_l0, other)
    with private.without_weak_references(part):
        torch.utils.swap_tensors(part.weight_hh_l0, other)
    assert part.weight_hh_l0.sum() == 0
    assert not part._weights_have_changed()
    part.weight_hh_l0 = other
    assert part._weights_have_changed()


def test_non_persistent_buffers_set():
    module = nn.Module()
    module.register_buffer("a", torch.zeros(1))
    module.register_buffer("b", torch.zeros(1), persistent=False)
    assert private.unsaved_buffers(module) == {"b"}


def test_tables_of_modules():
    """Entries of `_parameters`, `_modules` and `_buffers` are attributes of the module, in order of registration."""
    module = nn.Linear(2, 2)
    assert list(module._parameters) == ["weight", "bias"]
    module._parameters["weight"] = other = nn.Parameter(torch.zeros(2, 2))
    assert module.weight is other
    assert list(nn.Sequential(module, nn.ReLU())._modules) == ["0", "1"]
    assert list(nn.BatchNorm1d(2)._buffers) == ["running_mean", "running_var", "num_batches_tracked"]


def test_pytree():
    tree = {"b": [1, (2, None)], "a": 3}
    leaves, spec = pytree.tree_flatten(tree)
    assert isinstance(spec, pytree.TreeSpec)
    assert pytree.tree_unflatten(leaves, spec) == tree
    assert pytree.tree_leaves(tree) == leaves
    assert pytree.tree_map(lambda x: x, tree) == tree
    assert pytree.tree_map_only(int, lambda x: x + 1, [1, None]) == [2, None]


def test_operations():
    assert private.argument_names(torch.ops.aten.bernoulli_.float) == ["self", "p", "generator"]
    assert private.works_in_place(torch.ops.aten.bernoulli_.float)
    assert not private.works_in_place(torch.ops.aten.bernoulli.default)
    assert not private.works_in_place(torch.ops.aten.bernoulli.out)
    assert torch.Tag.nondeterministic_seeded in torch.ops.aten.bernoulli_.float.tags


def test_functions_within_modes_and_transforms() -> None:
    """The innermost function mode and the presence of functorch transforms are detected."""

    class Mode(TorchFunctionMode):
        seen: ClassVar[list[bool]] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(private.in_functorch())
            return func(*args, **(kwargs or {}))

    x = torch.ones(3)
    with Mode() as mode:
        assert private.pop_function_mode() is mode
        x.sin()
        private.push_function_mode(mode)
        x.cos()
        torch.vmap(torch.sin)(x)
    assert mode.seen[0] is False
    assert mode.seen[-1] is True


def test_the_generator_around_a_checkpoint() -> None:
    """A replaced checkpoint generator runs up to its yield before the block, and to its end after the block.

    Because this generator only yields, the block saves its tensors normally and runs once. With the original generator,
    the block runs again in backward.
    """
    seen: list[str] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        seen.append("begins")
        yield
        seen.append("ends")

    def inside(x: torch.Tensor) -> torch.Tensor:
        seen.append("runs")
        return x * x

    before = private.replace_checkpoints(make)
    try:
        checkpoint(inside, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()
    finally:
        assert private.replace_checkpoints(before) is make
    assert seen == ["begins", "runs", "ends"]
    checkpoint(inside, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen[3:] == ["runs", "runs"]


def test_references_of_python_are_counted_without_the_graph() -> None:
    """A reference from the autograd graph does not change the count, and a second name adds one."""
    held = {0: torch.ones(3, requires_grad=True) * 1}
    alone = private.count_python_references(held[0])  # an assert would add a reference
    product = held[0] * held[0]
    in_graph = private.count_python_references(held[0])
    name = held[0]
    named = private.count_python_references(held[0])
    assert (alone, in_graph, named) == (1, 1, 2)
    assert name.shape == product.shape


def shard_and_undo(rank: int) -> list[Any]:
    """Shard two layers with `fully_shard`, undo the outer unit, run a backward for weights only, and free shards."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicas",))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    own = [p.detach().clone() for p in model.parameters()]
    fully_shard(model[0], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    found: list[Any] = [[(part is model[1], name) for part, name, _ in private.managed_parameters(model)]]
    private.remove_fully_shard(model, lambda p: nn.Parameter(p.full_tensor()))
    found += [type(model) is nn.Sequential, [type(p) is nn.Parameter for p in model[1].parameters()]]
    model.load_state_dict(dict(model.state_dict()))
    out = model(torch.ones(1, 2)).sum()
    model[0].set_requires_gradient_sync(False)
    model[0].set_reshard_after_backward(False)
    weights = list(model[0].parameters())
    for weight, gradient in zip(weights, torch.autograd.grad(out, weights), strict=True):
        weight.grad = gradient
    model[0].set_requires_gradient_sync(True)
    model[0].set_reshard_after_backward(True)
    private.finish_sharded_backward(model[0])
    found += [[isinstance(p.grad, DTensor) for p in model[0].parameters()]]
    found += [all(torch.equal(p.full_tensor(), q) for p, q in zip(model[0].parameters(), own[:2], strict=True))]
    private.forget_shards(model[0])
    group = model[0]._get_fsdp_state()._fsdp_param_groups[0]
    return [*found, [p._sharded_param_data.numel() for p in group.fsdp_params]]


def test_fully_shard():
    expected = [[(True, "weight"), (True, "bias")], True, [True, True], [True, True], True, [0, 0]]
    for found in run_ranks(shard_and_undo, 2, timeout=60):
        assert found == expected


def test_store_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store warnings are silenced by the level of torch's C++ log, unless the environment specifies a level."""
    library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
    level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    before = level.value
    try:
        level.value = 1
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "WARNING")
        private.silence_store_warnings()
        assert level.value == 1
        monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
        private.silence_store_warnings()
        assert level.value == 2
    finally:
        level.value = before


def test_inheriting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not private.is_imported_by_worker()
    assert "current_process()._inheriting = True" in inspect.getsource(multiprocessing.spawn)
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    assert private.is_imported_by_worker()


def test_transforms_of_torch_func() -> None:
    """`torch.func.grad` works inside hooks for saved tensors."""
    x, saved = torch.rand(3, requires_grad=True), list[torch.Tensor]()

    def cube(z: torch.Tensor) -> torch.Tensor:
        return z.pow(3).sum()

    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
            torch.func.grad(cube)(x)
        with private.allow_transforms():
            slopes = torch.func.grad(cube)(x)
            inside = len(saved)
            torch.func.grad(cube)(x.detach())
            assert len(saved) == inside
        x.exp()
        assert len(saved) > inside
    assert torch.allclose(slopes, 3 * x**2)
    assert private.has_storage(x)
    assert not private.has_storage(torch._efficientzerotensor(3))
    assert not private.has_storage(x.detach().to_sparse())
    assert not private.has_storage(x.to("meta"))


def test_lazy_clone():
    """A copy on write uses the same memory until one of both is written, also through `data` and by NumPy."""
    tensor = torch.arange(8.0)
    lazy = private.make_copy_on_write(tensor)
    part = private.make_copy_on_write(tensor[2:])
    assert private.is_copy_on_write(tensor)
    assert private.storage_address(lazy) == private.storage_address(part) == private.storage_address(tensor)
    (lazy + 1).sum(), torch.equal(lazy, tensor), lazy.clone()
    assert private.is_copy_on_write(lazy)
    lazy.data.add_(1)
    assert not private.is_copy_on_write(lazy)
    assert tensor.equal(torch.arange(8.0))
    assert part.equal(tensor[2:])
    with pytest.raises(RuntimeError):
        private.make_copy_on_write(torch.zeros(4).share_memory_())
