"""Loading of safetensors files into modules on `meta`. Each rank reads only the tensors of its own layers."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_pipes.engine.private_torch import without_weak_references
from lightning_pipes.ir import InputError
from lightning_pipes.trainer.ranks.replicas import copy_whole
from lightning_pipes.trainer.weights import private_transformers as private
from lightning_pipes.trainer.weights.initializers import InitialWrites, find_initializers, list_parts_first

_WEIGHTS_ATTRIBUTE = "_lightning_pipes_pretrained"
"""The attribute of a module that stores its `PretrainedWeights` until ranks read them."""
_INDEX_SUFFIX = ".index.json"
_MAX_LISTED_NAMES = 5
"""The maximum number of names in a message."""

_reads_later: ContextVar[bool] = ContextVar("reads_later", default=False)


def load_pretrained(module: nn.Module, path: str | Path, *, strict: bool = True) -> None:
    """Fill the weights of a module on `meta` from safetensors files.

    Call this function in `configure_model`, after the module was created under `torch.device("meta")`. With
    `PipelineStrategy`, each rank reads the tensors of its own layers when the module is cut. With any other strategy,
    all tensors are read immediately. The keys in the files must be the keys of `module.state_dict()`. For models of
    transformers, the renames and conversions of that library are applied. Values are converted to the dtype of the
    module.

    Args:
        module: a module, or a part of one, whose tensors are all on `meta`.
        path: a `.safetensors` file, or a folder in the format of `save_pretrained`, which contains one file, or several
            files with an index.
        strict: whether to raise InputError for tensors without a value in the files and for keys without a tensor. If
            False, such tensors are initialized, and such keys are ignored.

    Raises:
        InputError: the file does not exist, a name or a shape differs, a tensor is not on `meta`, or the values of a
            tensor are unknown because it is not in the files and its part can't initialize it.
    """
    real = [name for name, tensor in _named_tensors(module) if not tensor.is_meta]
    if real:
        raise InputError(
            f"load_pretrained fills modules on meta, and {list_names(real)} of {type(module).__name__} is not there; "
            "make the module under torch.device('meta'), or use load_state_dict"
        )
    weights = PretrainedWeights(module, Path(path))
    if strict:
        weights.check_names()
    if _reads_later.get():
        module.__dict__[_WEIGHTS_ATTRIBUTE] = weights
        return
    device = torch.empty(0).device
    initializers = find_initializers(module)
    inside = InitialWrites(module, initializers).inside
    set_inside = {id(t) for tensors in inside.values() for t in tensors}
    for name, part in module.named_modules():
        unknown = [t for t in own_tensors(part) if t not in weights and id(t) not in set_inside]
        if unknown and id(part) not in initializers:
            raise InputError(explain_unknown_values(f"{type(module).__name__}{name and f'.{name}'}", part))
    for part in module.modules():
        give_memory(part, own_meta_tensors(part), torch.device("cpu") if device.type == "meta" else device)
    for part in list_parts_first(module):
        changed = (*own_tensors(part), *inside.get(id(part), ()))
        if id(part) in initializers and not all(t in weights for t in changed):
            initializers[id(part)]()
    weights.fill(list(chain.from_iterable(own_tensors(part) for part in module.modules())))


@contextmanager
def reads_later() -> Iterator[None]:
    """Make `load_pretrained` defer reading while the block runs, so that the ranks of a pipeline read their tensors."""
    token = _reads_later.set(True)
    try:
        yield
    finally:
        _reads_later.reset(token)


def find_attached(module: nn.Module) -> list[PretrainedWeights]:
    """Return the weights that `load_pretrained` has deferred."""
    return [part.__dict__[_WEIGHTS_ATTRIBUTE] for part in module.modules() if _WEIGHTS_ATTRIBUTE in part.__dict__]


def take_attached(module: nn.Module) -> list[PretrainedWeights]:
    """Return the weights that `load_pretrained` has deferred, and remove them from the module."""
    found = find_attached(module)
    for part in module.modules():
        part.__dict__.pop(_WEIGHTS_ATTRIBUTE, None)
    return found


@dataclass(frozen=True)
class _Source:
    """The entries of the files from which one tensor, or several tensors together, are made.

    Attributes:
        keys: the keys of the entries in the files.
        converted: whether transformers converts the values, for instance by merging experts.
    """

    keys: tuple[str, ...]
    converted: bool


class PretrainedWeights:
    """The values of the tensors of a module in safetensors files.

    Args:
        module: the module, whose tensors are on `meta`.
        path: a file or a folder, see `load_pretrained`.

    Raises:
        InputError: the file does not exist.
    """

    def __init__(self, module: nn.Module, path: Path) -> None:
        self._path = path
        self._files = _find_keys(path)
        self._where = type(module).__name__
        self._names: dict[int, list[str]] = defaultdict(list)
        """The names of each tensor by the id of the tensor. Tied tensors have several names."""
        self._tensors: dict[int, Tensor] = {}
        for name, tensor in _named_tensors(module):
            self._names[id(tensor)].append(name)
            self._tensors[id(tensor)] = tensor
        self._ignored: tuple[str, ...] = private.ignored_keys(module)
        self._skeleton: nn.Module | None = None
        self._sources = self._find_sources(module)

    def __contains__(self, tensor: Tensor) -> bool:
        return any(name in self._sources for name in self._names.get(id(tensor), ()))

    def describe_source(self, tensor: Tensor) -> Hashable:
        """Return a value that is equal for tensors of other modules if their values in the files are the same.

        Args:
            tensor: a tensor that has a value in the files.
        """
        name = next(name for name in self._names[id(tensor)] if name in self._sources)
        source = self._sources[name]
        files = [os.stat(path) for path in dict.fromkeys(self._files[key] for key in source.keys)]
        versions = tuple((file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns) for file in files)
        return versions, source, name if source.converted else ""

    def replace_tensor(self, old: Tensor, new: Tensor) -> None:
        """Register the tensor `new` to be filled instead of `old`, with the same names."""
        if id(old) in self._tensors:
            self._names[id(new)] = self._names.pop(id(old))
            self._tensors[id(new)] = new
            del self._tensors[id(old)]

    def check_names(self) -> None:
        """Raise InputError if a tensor of the state dict has no value in the files, or if a key has no tensor."""
        missing = [names[0] for key, names in self._names.items() if self._tensors[key] not in self]
        missing = [name for name in missing if name in self._persistent]
        used = {key for source in self._sources.values() for key in source.keys}
        other = [key for key in self._files if key not in used and not any(re.search(p, key) for p in self._ignored)]
        problems = [f"has no value for {list_names(missing)}"] if missing else []
        problems += [f"has {list_names(other)}, which {self._where} does not have"] if other else []
        if problems:
            raise InputError(
                f"{self._path} {', and '.join(problems)}; name the files of this model, call load_pretrained on the "
                "part whose names these are, or pass strict=False"
            )

    def fill(self, tensors: Collection[Tensor]) -> None:
        """Copy the values from the files into tensors that already have memory.

        Tensors on `meta` and tensors without a source are skipped. Only one source is in memory at a time in addition
        to the tensors.

        Raises:
            InputError: the shape of a value differs from the shape of its tensor.
        """
        wanted = {id(tensor): tensor for tensor in tensors if not tensor.is_meta and tensor in self}
        converted: dict[_Source, None] = {}
        with torch.no_grad():
            for key, tensor in wanted.items():
                source = next(self._sources[name] for name in self._names[key] if name in self._sources)
                if source.converted:
                    converted[source] = None
                else:
                    self._copy(self._read(source.keys[0]), tensor, key)
            for source in converted:
                assert self._skeleton is not None
                values = {key: self._read(key) for key in source.keys}
                for name, value in private.convert_weights(self._skeleton, values):
                    for key, tensor in wanted.items():
                        if name in self._names[key]:
                            self._copy(value, tensor, key)

    def _copy(self, value: Tensor, tensor: Tensor, key: int) -> None:
        if value.shape != tensor.shape:
            raise InputError(
                f"{self._path} has {self._names[key][0]} of shape {tuple(value.shape)}, and {self._where} needs "
                f"{tuple(tensor.shape)}; make the module by the configuration of this file"
            )
        copy_whole(value, tensor)

    def _read(self, key: str) -> Tensor:
        with _open_safetensors(self._files[key]) as file:
            return cast(Tensor, file.get_tensor(key))

    def _find_sources(self, module: nn.Module) -> dict[str, _Source]:
        self._persistent = set(module.state_dict(keep_vars=True))
        names = {name for names in self._names.values() for name in names}
        groups: dict[str, list[str]] = defaultdict(list)
        renamed = private.rename_keys(module, list(self._files))
        for key, (name, is_converted) in renamed.items():
            groups[name].append(key)
            if is_converted and self._skeleton is None:
                self._skeleton = private.copy_on_meta(module)
        found = {}
        for name, keys in groups.items():
            is_converted = renamed[keys[0]][1]
            source = _Source(tuple(keys), is_converted)
            targets = private.name_targets(module, name, keys) if is_converted else [name]
            found.update({target: source for target in targets if target in names})
        return found


def explain_unknown_values(where: str, part: nn.Module) -> str:
    """Return the message of an error about a part on `meta` without known values of its tensors.

    Args:
        where: the path of the part in the module.
        part: the part.
    """
    return (
        f"{where} is a {type(part).__name__} with weights on meta and has no reset_parameters(), so their values are "
        "unknown; add that method, which fills them in, call load_pretrained with files that have them, or make this "
        "part outside of torch.device('meta')"
    )


def own_tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module without the tensors of its submodules."""
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def own_meta_tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers on `meta` of a module without the tensors of its submodules."""
    return [t for t in own_tensors(module) if t.is_meta]


def give_memory(
    module: nn.Module, tensors: Iterable[Tensor], device: torch.device, values: Mapping[int, Tensor] = {}
) -> None:
    """Allocate uninitialized memory on a device for tensors of a module, or release it if the device is `meta`.

    The tensors stay the same objects.

    Args:
        module: the module. If it is recurrent, its weak references to weights are renewed.
        tensors: the tensors of the module.
        device: the device.
        values: tensors whose memory is used instead, by the id of the tensor of the module.
    """
    with without_weak_references(module):
        for tensor in tensors:
            empty = values[id(tensor)] if id(tensor) in values else torch.empty_like(tensor, device=device)
            made = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
            torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _find_keys(path: Path) -> Mapping[str, str]:
    """Return the path of the file that contains each key."""
    if path.is_dir():
        index = sorted(path.glob(f"*.safetensors{_INDEX_SUFFIX}"))
        if index:
            table = json.loads(index[0].read_text(encoding="utf-8")).get("weight_map", {})
            _check_inside(path, table.values())
            return {key: str(path / name) for key, name in table.items()}
        files = sorted(path.glob("*.safetensors"))
    else:
        files = [path] if path.suffix == ".safetensors" and path.is_file() else []
    if len(files) != 1:
        found = f"{len(files)} of them and no index" if files else "none"
        raise InputError(
            f"load_pretrained needs a .safetensors file, or a folder of them with an index, and {path} has {found}"
            "; name the folder that save_pretrained has written"
        )
    with _open_safetensors(str(files[0])) as file:
        return dict.fromkeys(file.keys(), str(files[0]))


def _check_inside(folder: Path, names: Collection[str]) -> None:
    """Raise InputError if an index names a file outside of its folder, or a file that does not exist."""
    for name in dict.fromkeys(names):
        if Path(name).name != name:
            raise InputError(f"the index in {folder} names the file {name!r}, which is outside of that folder")
        if not (folder / name).is_file():
            raise InputError(f"the index in {folder} names the file {name!r}, which is not there; copy all its files")


def _open_safetensors(path: str) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise InputError("load_pretrained needs the package safetensors: pip install safetensors") from error
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise InputError(f"{path} is not a whole safetensors file ({error}); copy or write it again") from error


def list_names(names: Sequence[str]) -> str:
    """Return a text with the first names and the number of further names."""
    more = f" and {len(names) - _MAX_LISTED_NAMES} more" if len(names) > _MAX_LISTED_NAMES else ""
    return ", ".join(names[:_MAX_LISTED_NAMES]) + more
