"""Export of the weights of a checkpoint to safetensors files, which other libraries can load."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_pipes.ir import InputError, PipelineError, check_count, check_type
from lightning_pipes.trainer.checkpoint.checksums import is_sharded
from lightning_pipes.trainer.checkpoint.files import AtomicCheckpointIO, find_existing, load_mapped, replace_path
from lightning_pipes.trainer.checkpoint.sharded import ShardedCheckpoint
from lightning_pipes.trainer.weights import private_transformers as private

SAFETENSORS_FILE = "model.safetensors"
_MAX_NAMED_PARTS = 5


def export_weights(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    prefix: str = "",
    model: nn.Module | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write the weights of a checkpoint as safetensors files, as `save_pretrained` does.

    The function runs in a single process, and reads tensors from the checkpoint one by one.

    Args:
        checkpoint: a checkpoint file of Lightning, or a folder that `checkpoint="sharded"` has written.
        folder: the folder to write, with one file, or several files and an index. An existing file or folder with this
            name is replaced.
        prefix: the attribute of the LightningModule that holds the model, such as "net". Other weights are left out.
        model: a model of transformers, which may be on `meta`. If it is given, names and shapes are those that its
            `from_pretrained` reads, and its configuration is also written.
        max_file_bytes: the size in bytes above which a new file begins.

    Raises:
        InputError: an argument has the wrong type, no weight has the prefix, or safetensors is not installed.
        PipelineError: the checkpoint is damaged, or it does not exist.
    """
    for name, value, kind in (
        ("checkpoint", checkpoint, str | Path),
        ("folder", folder, str | Path),
        ("prefix", prefix, str),
        ("model", model, nn.Module | None),
    ):
        check_type(f"export_weights: {name}", value, kind)
    check_count("export_weights: max_file_bytes", max_file_bytes)
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise InputError("export_weights needs the package safetensors: pip install safetensors") from error
    found = _select(_read_state_dict(Path(checkpoint)), prefix)
    if model is not None:
        found = private.revert_weights(model, found)
    files = list(_divide(found, max_file_bytes))
    with replace_path(Path(folder)) as temporary:
        temporary.mkdir()
        table: dict[str, str] = {}
        for number, names in enumerate(files, 1):
            file = SAFETENSORS_FILE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            save_file({name: _copy(found[name]) for name in names}, temporary / file, metadata={"format": "pt"})
            table.update(dict.fromkeys(names, file))
        if len(files) > 1:
            size = sum(tensor.nbytes for tensor in found.values())
            index = {"metadata": {"total_size": size}, "weight_map": table}
            (temporary / f"{SAFETENSORS_FILE}.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
        if model is not None:
            private.save_configuration(model, temporary)


def _read_state_dict(path: Path) -> Mapping[str, Any]:
    path = find_existing(path)
    if is_sharded(path):
        whole: Mapping[str, Any] | None = ShardedCheckpoint(path, weights_only=True).checkpoint(None)
    else:
        whole = load_mapped(AtomicCheckpointIO(), path, weights_only=True)
    if whole is None:
        raise PipelineError(
            f"{path} is not a checkpoint. Give the path of a .ckpt file, or of a folder that was written with "
            "checkpoint='sharded'"
        )
    return whole["state_dict"]  # type: ignore[no-any-return]


def _select(state: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    """Return the tensors below a prefix by their names without the prefix."""
    start = f"{prefix.rstrip('.')}." if prefix else ""
    keys = [key for key in state if key.startswith(start)]
    if not keys:
        parts = ", ".join(list(dict.fromkeys(key.split(".")[0] for key in state))[:_MAX_NAMED_PARTS]) or "nothing"
        raise InputError(
            f"no weight of the checkpoint has a name that begins with {start!r}. Choose a prefix from the names of "
            f"the weights, which begin with {parts}"
        )
    return {key.removeprefix(start): value for key in keys if isinstance(value := state[key], Tensor)}


def _divide(tensors: Mapping[str, Tensor], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with its own memory, because safetensors does not accept tensors that share memory."""
    return tensor.detach().clone().contiguous()
