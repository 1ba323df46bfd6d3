"""Undocumented interfaces of transformers that loading of weights and steps need, from version 5 on.

Every function also works if transformers is not installed, because no module is a transformers model then.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def is_pretrained_model(module: nn.Module) -> bool:
    """Return whether a module is a transformers model."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def initialize(model: nn.Module, part: nn.Module) -> None:
    """Set the initial values of a part of a model, including its buffers."""
    with torch.no_grad():
        model._init_weights(part)  # type: ignore[operator]


def install_output_hooks(module: nn.Module) -> None:
    """Install the hooks with which the models in a module collect outputs of their layers.

    A model installs these hooks itself in the first step that requests outputs, and records this in an attribute.
    Micro-batches start with the attributes from the start of their batch, and would therefore install the hooks again.
    """
    library = sys.modules.get("transformers.utils.output_capturing")
    for part in module.modules() if library is not None else ():
        if is_pretrained_model(part):
            library.maybe_install_capturing_hooks(part)  # type: ignore[union-attr]


def ignored_keys(module: nn.Module) -> tuple[str, ...]:
    """Return patterns of keys in files that the model does not need, according to transformers."""
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None) if is_pretrained_model(module) else None
    return (*(patterns or ()), r"rotary_emb\.inv_freq$") if is_pretrained_model(module) else ()


def rename_keys(module: nn.Module, keys: Sequence[str]) -> dict[str, tuple[str, bool]]:
    """Return the name of each key in the module, and whether its value is also converted.

    If a value is converted into several tensors, the name is the name of the first tensor.
    """
    mapping = _conversions(module)
    if not mapping:
        return {key: (key, False) for key in keys}
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    prefix, state = str(module.base_model_prefix), module.state_dict()
    renamed = {}
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        renamed[key] = (name, pattern is not None)
    return renamed


def name_targets(module: nn.Module, name: str, keys: Sequence[str]) -> list[str]:
    """Return the names of all tensors that these keys produce together. `name` is the first of them."""
    from transformers.core_model_loading import WeightConverter

    for converter in _conversions(module):
        if isinstance(converter, WeightConverter) and converter.rename_source_key(keys[0])[1] is not None:
            first, *others = converter.target_patterns
            return [name, *(name.replace(first, other) for other in others)]
    return [name]


def copy_on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module that is on `meta`."""
    return copy.deepcopy(module)


def convert_weights(skeleton: nn.Module, values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors into which the values of files are converted.

    The skeleton is on `meta` again afterwards.

    Raises:
        ValueError: transformers cannot convert the values.
    """
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import logging

    settings = LoadStateDictConfig(weight_mapping=_conversions(skeleton))
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        info, _ = convert_and_load_state_dict_in_model(skeleton, dict(values), settings)  # type: ignore[arg-type]
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    if info.conversion_errors or info.mismatched_keys:
        problem = next(iter(info.conversion_errors.items()), None) or sorted(info.mismatched_keys)[0]
        raise ValueError(f"transformers can't convert {sorted(values)[:3]}: {problem}")
    for name, parameter in list(skeleton.named_parameters()):
        if not parameter.is_meta:
            yield name, parameter.detach()
            owner, _, leaf = name.rpartition(".")
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            setattr(skeleton.get_submodule(owner), leaf, empty)


def _conversions(module: nn.Module) -> list[Any]:
    """Return the renamings and conversions of transformers for a model. They have state, so each use needs new ones."""
    if not is_pretrained_model(module):
        return []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before transformers 5, files used the names of the model
        return []
    return list(get_model_conversion_mapping(module))  # type: ignore[arg-type]


def revert_weights(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights without tied weights, with the names and formats of the files that `save_pretrained` writes.

    Args:
        model: only the configuration and the classes of the model are used.
        state: the weights by their names in `model.state_dict()`.
    """
    if not is_pretrained_model(model):
        return dict(state)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    own = {name: value for name, value in state.items() if not (name in tied and tied[name] in state)}
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5
        return own
    return dict(revert_weight_conversion(model, own))  # type: ignore[arg-type]


def save_configuration(model: nn.Module, folder: Path) -> None:
    """Write the configuration files that `from_pretrained` reads."""
    for config in (getattr(model, "config", None), getattr(model, "generation_config", None)):
        if config is not None and hasattr(config, "save_pretrained"):
            if hasattr(config, "architectures"):
                config.architectures = [type(model).__name__]
            config.save_pretrained(folder)
