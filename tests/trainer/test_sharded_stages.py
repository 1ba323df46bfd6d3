"""Tests of stages whose layers are sharded by `fully_shard` and `parallelize_module`, compared with one process.

`configure_model` follows Lightning's example for ModelParallelStrategy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import PipelineStrategy, consolidate, load_pretrained
from lightning_pipes.engine.watch.failure import PeerFailure
from lightning_pipes.ir import InputError, PipelineError, PlanError
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.checkpoint.checksums import Index
from tests.trainer.lit import differences, plain_values, quiet
from tests.trainer.replicas import REPLICAS, ROWS, Dealt
from tests.trainers import make_trainer

SAMPLES = 22  # the last batch of an epoch has 3 samples per replica, the others have 4
EPOCHS = 2  # two optimizer steps each
TOKENS, WIDTH, HEADS = 11, 16, 4
LAYERS = 4


class Attention(nn.Module):
    """Causal attention with a given number of heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, heads * self.head_dim, bias=False) for _ in range(3))
        self.out = nn.Linear(heads * self.head_dim, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Shift(nn.Module):
    """A layer that adds a single parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(1))  # the second of two shards is empty
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.value, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.value


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(heads)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.shift = Shift()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(self.shift(x))))


class GPT(nn.Module):
    """A small GPT with tied embeddings, whose layers may get shards of the sequence."""

    def __init__(self, heads: int, hidden: int) -> None:
        super().__init__()
        self.sequence: DeviceMesh | None = None
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Block(heads, hidden) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        if self.sequence is not None:  # each tensor-parallel rank gets its shard of the sequence
            x = DTensor.from_local(x, self.sequence, [Replicate()]).redistribute(placements=[Shard(1)]).to_local()
        for layer in self.layers:
            x = layer(x)
        if self.sequence is not None:
            x = DTensor.from_local(x, self.sequence, [Shard(1)]).full_tensor()
        return self.head(self.norm(x))


class DistributedOutput(nn.Module):
    """A layer that returns a DTensor."""

    def __init__(self, layer: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.layer, self.mesh = layer, mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(self.layer(x), self.mesh, [Replicate()])


SEQUENCE_PLAN: dict[str, ParallelStyle] = {
    "norm": SequenceParallel(use_local_output=True),
    "shift": SequenceParallel(use_local_output=True),
    "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}
"""A plan for sequence parallelism.

Layers get and return their shard of the sequence, so messages between stages contain shards as well.
"""


class LitGPT(pl.LightningModule):
    """A module with a GPT that `configure_model` shards over its device mesh.

    Args:
        heads: number of attention heads.
        hidden: hidden size of each layer.
        meta: whether to create the weights on `meta`.
        how: a variant of sharding, sharing or hooks.
        file: a file with initial weights.
    """

    def __init__(
        self, heads: int = HEADS, hidden: int = 2 * WIDTH, meta: bool = False, how: str = "", file: Path | None = None
    ) -> None:
        super().__init__()
        self.heads, self.hidden, self.meta, self.how, self.file = heads, hidden, meta, how, file
        self.model: GPT | None = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        torch.manual_seed(5)
        with torch.device("meta" if self.meta else "cpu"):
            self.model = GPT(self.heads, self.hidden).double()
        if self.how == "shared":
            self.model.layers[3].shift = self.model.layers[0].shift
        if self.device_mesh is not None:
            self.shard(self.model)
        self.model.layers[1].requires_grad_(False)  # after `shard`, because SequenceParallel creates new parameters
        if self.file is not None:
            load_pretrained(self.model, self.file)

    def shard(self, model: GPT) -> None:
        """Shard the model over replicas and tensor-parallel ranks."""
        replicas, shards = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        if self.how == "swapped":
            replicas, shards = shards, replicas
        if shards.size() > 1:
            columns = ["attention.query", "attention.key", "attention.value", "up"]
            plan = {name: ColwiseParallel() for name in columns}
            plan.update({name: RowwiseParallel() for name in ("attention.out", "down")})
            if self.how == "sequence":
                model.sequence = shards
                plan = SEQUENCE_PLAN
            for layer in model.layers:
                parallelize_module(layer, shards, plan)
        if self.how == "tied":
            model.layers[3].up.weight = model.layers[0].up.weight
        if self.how == "distributed":
            model.layers[0] = DistributedOutput(model.layers[0], shards)
        if replicas.size() > 1 and self.how not in ("replicas", "shared"):
            for layer in model.layers if self.how != "one unit" else ():
                fully_shard(layer, mesh=self.device_mesh["pipeline"] if self.how == "pipeline" else replicas)
            if self.how == "own mesh":
                fully_shard(model.head, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("x", "y"))["y"])
            fully_shard(model, mesh=replicas)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.model(batch[0][:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch[0][:, :-1])
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten()), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.how == "grad_norm":
            grad_norm(self, 2)
        self.log("norm", get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Seen(pl.Callback):
    """A callback that records logged values, gradient norms, and the bytes of weights and gradients."""

    def __init__(self) -> None:
        self.logged: list[float] = []
        self.kept: list[dict[str, int]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        self.kept.append(count_bytes(module.model.layers))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.logged += [float(v) for k, v in sorted(trainer.logged_metrics.items()) if k != "loss_epoch"]

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if "val_loss" in trainer.callback_metrics:
            self.logged.append(float(trainer.callback_metrics["val_loss"]))


def count_bytes(layers: nn.Module) -> dict[str, int]:
    """Return the bytes of local and of whole weights and gradients on this rank."""
    own = [weight for weight in layers.parameters() if not weight.is_meta]  # weights on meta belong to another stage
    trained = [weight for weight in own if weight.grad is not None]
    return {
        "whole": sum(weight.nbytes for weight in own),
        "weights": count_allocated(own),
        "trained": sum(weight.nbytes for weight in trained),
        "gradients": count_allocated([weight.grad for weight in trained]),
    }


def count_allocated(tensors: Sequence[torch.Tensor]) -> int:
    """Return the allocated bytes of tensors that may share memory."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}
    return sum(memory.values())


def data(rows: int = SAMPLES) -> TensorDataset:
    """Return random token sequences."""
    return TensorDataset(torch.randint(TOKENS, (rows, 7), generator=torch.Generator().manual_seed(1)))


def train(
    path: Path,
    strategy: Any = "auto",
    devices: int = 1,
    resume: Path | None = None,
    replicas: int = 1,
    epochs: int = EPOCHS,
    **module: Any,
) -> dict[str, Any]:
    """Train with gradient clipping and accumulation, and save a checkpoint. A resumed run trains for one more epoch."""
    quiet()
    pl.seed_everything(3, verbose=False)
    lit, seen = LitGPT(**module), Seen()
    trainer = make_trainer(
        devices=devices,
        strategy=strategy,
        precision="64-true",
        max_epochs=epochs if resume is None else epochs + 1,
        gradient_clip_val=0.05,
        accumulate_grad_batches=2,
        callbacks=[seen],
    )
    sampler = None if replicas == REPLICAS else Dealt(SAMPLES, shuffle=True)
    rows = ROWS * REPLICAS // replicas
    trainer.fit(lit, DataLoader(data(), rows, sampler=sampler), DataLoader(data(8), rows // 2), ckpt_path=resume)
    trainer.save_checkpoint(path)
    return {"logged": seen.logged, "kept": seen.kept}


def saved_in(path: Path) -> Any:
    """Return the weights and optimizer states in a checkpoint, which contain whole parameters."""
    saved = torch.load(path, weights_only=False)
    return plain_values([saved["state_dict"], saved["optimizer_states"][0]["state"]])


FILE = "weights.safetensors"
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "fsdp": (REPLICAS, {}, {}),
    "parts": (REPLICAS, {"checkpoint": "sharded", "recompute": True}, {}),
    "split": (REPLICAS, {"schedule": "zero_bubble"}, {"meta": True, "file": FILE}),
    "tensors": (1, {"tensor_parallel": 2}, {}),
    "tensor parts": (1, {"tensor_parallel": 2, "checkpoint": "sharded"}, {}),
}
CUBES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "cube": (REPLICAS, {"tensor_parallel": 2}, {}),
    "cube of replicas": (REPLICAS, {"tensor_parallel": 2}, {"how": "replicas"}),
    "sequence": (REPLICAS, {"tensor_parallel": 2, "schedule": "gpipe"}, {"how": "sequence"}),
    "shared": (REPLICAS, {"tensor_parallel": 2}, {"how": "shared"}),
    "cube on meta": (REPLICAS, {"tensor_parallel": 2}, {"meta": True}),
    "cube parts": (REPLICAS, {"tensor_parallel": 2, "checkpoint": "sharded", "async_checkpoint": False}, {}),
}
"""The number of replicas, and the arguments of the strategy and of the module, by the name of the checkpoint."""


def in_folder(folder: str | Path, module: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a module, with the path of its file in `folder`."""
    return {name: Path(folder, value) if name == "file" else value for name, value in module.items()}


def train_sharded(
    rank: int, folder: str, names: tuple[str, ...], processes: int, epochs: int = EPOCHS
) -> dict[str, Any]:
    """Train the named cases in the same processes."""
    found = {}
    for name in names:
        replicas, settings, module = {**CASES, **CUBES}[name]
        strategy = PipelineStrategy(**{"microbatches": 2, "data_parallel": replicas, **settings})
        more = in_folder(folder, module)
        found[name] = train(Path(folder, name), strategy, processes, replicas=replicas, epochs=epochs, **more)
    return found


def resume(
    rank: int, folder: str, names: tuple[str, ...], processes: int, replicas: int, shards: int, epochs: int = EPOCHS
) -> list[Any]:
    """Resume from the named checkpoints with the given numbers of processes, replicas and tensor-parallel ranks."""
    found = []
    for name in names:
        strategy = PipelineStrategy(microbatches=2, data_parallel=replicas, tensor_parallel=shards)
        path = Path(folder, f"{name} on {processes} {replicas} {shards}")
        found.append(train(path, strategy, processes, Path(folder, name), replicas, epochs)["logged"])
    return found


def train_and_resume(rank: int, folder: str, parts: tuple[str, ...]) -> tuple[dict[str, Any], list[Any]]:
    """Train and resume in the same processes, whose caches for operations on DTensors are filled by then."""
    return train_sharded(rank, folder, tuple(CASES), 4), resume(rank, folder, ("tensors", *parts), 4, 2, 1)


def compare(folder: Path, ranks: Sequence[dict[str, Any]], epochs: int = EPOCHS) -> None:
    """Compare logs and checkpoints with one process.

    The weights of a case are created on the CPU, on `meta`, or loaded from a file, and the process starts the same way.
    """
    whole = {}
    for name in ranks[0]:
        module = {**CASES, **CUBES}[name][2]
        plain = f"plain{' on meta' * module.get('meta', False)}{' from file' * ('file' in module)}"
        shares = module.get("how") == "shared"
        plain += " shared" * shares
        if plain not in whole:
            begin = {key: module[key] for key in ("meta", "file") if key in module}
            strategy = PipelineStrategy() if begin else "auto"
            begin.update({"how": "shared"} if shares else {})
            whole[plain] = train(folder / plain, strategy, epochs=epochs, **in_folder(folder, begin))
        for found in ranks:
            assert differences(found[name]["logged"], whole[plain]["logged"], tolerance=1e-10) == [], name
        path = folder / name
        if path.is_dir():
            path = path.with_suffix(".ckpt")
            consolidate(folder / name, path, weights_only=False)
        assert differences(saved_in(path), saved_in(folder / plain), tolerance=1e-10) == [], name


def check_parts(folder: Path, shards: int) -> None:
    """Check that each rank wrote its own shards of weights and optimizer states.

    Tensors that are not sharded are written once.
    """
    places = Index.read(folder).places
    for entry in ("state_dict/model.layers.2.up.weight", "optimizer_states/0/model.layers.2.up.weight/exp_avg"):
        assert len({place.file for place in places[entry]}) == len(places[entry]) == shards, entry
    assert len(places["state_dict/model.embedding.weight"]) == 1


def check_bytes(ranks: Sequence[list[dict[str, int]]]) -> None:
    """Check that each of two processes holds half of its stage's weights and gradients at each optimizer step."""
    assert all(len(steps) == 2 * EPOCHS for steps in ranks)
    for steps in zip(*ranks, strict=True):
        for one, other in zip(steps[:2], steps[2:], strict=True):
            for part, whole in (("weights", "whole"), ("gradients", "trained")):
                assert one[whole] == other[whole] > 0
                assert 0 <= one[part] + other[part] - one[whole] <= 64  # shards are padded to equal sizes
                assert abs(one[part] - other[part]) <= 64
        assert sum(step["trained"] for step in steps) < sum(step["whole"] for step in steps)  # a layer is frozen


def test_two_stages_of_two_shards_are_one_process(tmp_path):
    """Sharded stages train, save and resume as one process, and each rank holds and writes only its shards."""
    weights = GPT(HEADS, 2 * WIDTH).state_dict()
    del weights["head.weight"]  # tied to the weight of the embedding
    save_file(weights, tmp_path / FILE)
    parts = ("parts", "tensor parts")
    ranks, again = zip(*run_ranks(train_and_resume, 4, str(tmp_path), parts, timeout=300), strict=True)
    compare(tmp_path, ranks)
    check_parts(tmp_path / "parts", 2)
    check_parts(tmp_path / "tensor parts", 2)
    check_bytes([found["fsdp"]["kept"] for found in ranks])
    further = train(tmp_path / "plain on", resume=tmp_path / "plain")["logged"]
    resumed = [train(tmp_path / "on", resume=tmp_path / "parts.ckpt")["logged"]]
    resumed += resume(0, str(tmp_path), parts, 1, 1, 1)
    resumed += [e for r in run_ranks(resume, 2, str(tmp_path), ("fsdp", *parts), 2, 1, 1, timeout=90) for e in r]
    resumed += [logged for found in again for logged in found]
    for logged in resumed:
        assert differences(logged, further, tolerance=1e-10) == []


@pytest.mark.slow
def test_twenty_steps_equal_one_process(tmp_path):
    """Twenty optimizer steps and a resumed run equal one process."""
    names, epochs = ("fsdp", "tensors"), 10
    compare(tmp_path, run_ranks(train_sharded, 4, str(tmp_path), names, 4, epochs, timeout=300), epochs)
    further = train(tmp_path / "plain on", resume=tmp_path / "plain", epochs=epochs)["logged"]
    resumed = [e for r in run_ranks(resume, 2, str(tmp_path), names, 2, 1, 1, epochs, timeout=90) for e in r]
    resumed += [e for r in run_ranks(resume, 4, str(tmp_path), ("tensors",), 4, 2, 1, epochs, timeout=90) for e in r]
    for logged in resumed:
        assert differences(logged, further, tolerance=1e-10) == []


@pytest.mark.slow
def test_two_stages_of_two_shards_of_two_tensor_parallel_ranks(tmp_path):
    """Two stages with FSDP and tensor parallelism together train, save and resume as one process."""
    compare(tmp_path, run_ranks(train_sharded, 8, str(tmp_path), tuple(CUBES), 8, timeout=400))
    further = train(tmp_path / "plain on", resume=tmp_path / "plain")["logged"]
    resumed = [train(tmp_path / "on", resume=tmp_path / "cube")["logged"]]
    check_parts(tmp_path / "cube parts", 4)
    names = ("cube", "plain", "cube parts")
    resumed += [e for r in run_ranks(resume, 8, str(tmp_path), names, 8, 2, 2, timeout=200) for e in r]
    resumed += [e for r in run_ranks(resume, 4, str(tmp_path), ("cube parts",), 4, 1, 2, timeout=90) for e in r]
    resumed += resume(0, str(tmp_path), ("cube parts",), 1, 1, 1)
    for logged in resumed:
        assert differences(logged, further, tolerance=1e-10) == []


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"tensor_parallel": 4}, {}, r"2 processes can't be divided among data_parallel=1 pipelines of tensor_parallel=4"),
    ({"tensor_parallel": 2}, {"heads": 3}, r"tensor_parallel=2 does not divide the 3 heads of LitGPT.model.layers.0"),
    ({"tensor_parallel": 2}, {"hidden": 31}, r"does not divide axis 1 of LitGPT.model.layers.0.down.weight, .* 31"),
    ({"data_parallel": 2}, {"how": "one unit"}, r"sharded the layers of self.model.layers as one unit, self.model"),
    (
        {"data_parallel": 2},
        {"how": "pipeline"},
        r"is sharded over pipeline; the ranks along pipeline hold other layers",
    ),
    ({"data_parallel": 2}, {"how": "own mesh"}, r"model.head.weight is sharded over y of other processes than this"),
    ({"data_parallel": 2}, {"how": "tied"}, r"layers.0.up.weight and self.model.layers.3.up.weight were one parameter"),
    ({"data_parallel": 2, "schedule": "pipedream"}, {}, r"and schedule 'pipedream' keeps versions of weights, which f"),
    ({"data_parallel": 2}, {"how": "grad_norm"}, r"DTensor, as .*grad_norm does .* torch.nn.utils.get_total_norm, and"),
    (
        {"data_parallel": 2},
        {"how": "swapped"},
        r"over data_parallel by parallelize_module, .*mesh\['tensor_parallel'\]",
    ),
    (
        {"tensor_parallel": 2},
        {"how": "swapped"},
        r"over tensor_parallel by fully_shard; .*device_mesh\['data_parallel'\]",
    ),
    ({"data_parallel": 2, "shard_optimizer": True}, {}, r"and shard_optimizer=True shards states that are sharded"),
]


def refusals(rank: int) -> list[str]:
    """Return the error messages of all refused cases."""
    quiet()
    found = []
    for settings, module, _ in REFUSED:
        trainer = make_trainer(strategy=PipelineStrategy(**settings), max_epochs=1, precision="64-true")
        kind = PlanError if settings.get("tensor_parallel") == 4 else (PipelineError, PeerFailure)
        with pytest.raises(kind) as error:
            trainer.fit(LitGPT(**module), DataLoader(data(), 4))
        found.append(str(error.value))
    return found


class LitChain(pl.LightningModule):
    """A module with all its weights in the layers, as schedules with stale gradients need it."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(5)
        self.net = nn.Sequential(*(Chained() for _ in range(LAYERS))).double()
        shards = self.device_mesh["tensor_parallel"]
        for layer in self.net if shards.size() > 1 else ():
            parallelize_module(layer, shards, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Chained(nn.Module):
    """A layer with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


STALE: dict[str, dict[str, Any]] = {
    "dynpipe": {"schedule": "dynpipe", "microbatches": 2, "recompute": True},
    "pipedream": {"schedule": "pipedream", "microbatches": 1, "schedule_args": {"predict": True}},
}


def train_stale(rank: int, folder: str, processes: int, shards: int) -> list[str]:
    """Train with each schedule, save, and return the errors of refused runs.

    With "dynpipe", a second epoch is resumed from the checkpoint of the first one.
    """
    quiet()
    random = torch.Generator().manual_seed(0)
    loader = DataLoader(TensorDataset(*torch.randn(2, 40, WIDTH, generator=random, dtype=torch.float64)), 8)
    for name, settings in STALE.items():
        for epochs in (1, 2) if name == "dynpipe" else (1,):
            strategy = PipelineStrategy(tensor_parallel=shards, **settings)
            trainer = make_trainer(devices=processes, strategy=strategy, precision="64-true", max_epochs=epochs)
            path = Path(folder, f"{name} {shards}")
            trainer.fit(LitChain(), loader, ckpt_path=path if epochs == 2 else None)
            trainer.save_checkpoint(path)
    strategy = PipelineStrategy("dynpipe", tensor_parallel=shards)
    clipped = make_trainer(devices=processes, strategy=strategy, max_epochs=1, gradient_clip_val=0.1)
    if shards == 1:
        return []
    with pytest.raises((PipelineError, PeerFailure)) as error:
        clipped.fit(LitChain().float(), loader)
    return [str(error.value)]


def test_stages_of_two_shards_train_with_stale_gradients(tmp_path):
    """Stages of two ranks save the same checkpoints as stages of one rank with the same schedule.

    The weights miss the same updates in both cases.
    """
    ranks = run_ranks(train_stale, 4, str(tmp_path), 4, 2, timeout=120)
    run_ranks(train_stale, 2, str(tmp_path), 2, 1, timeout=90)
    for name in STALE:
        assert differences(saved_in(tmp_path / f"{name} 2"), saved_in(tmp_path / f"{name} 1"), tolerance=1e-10) == []
    for (said,) in ranks:
        assert "'dynpipe' clips by the norm of a stage, of which a rank has shards" in said


def send_distributed(rank: int) -> str:
    """Return the error message if the last layer of a stage returns a DTensor."""
    quiet()
    trainer = make_trainer(strategy=PipelineStrategy(partition=[1]), max_epochs=1, precision="64-true")
    with pytest.raises((PipelineError, PeerFailure)) as error:
        trainer.fit(LitGPT(how="distributed"), DataLoader(data(), 4))
    return str(error.value)


def test_shards_that_do_not_fit_are_refused():
    for said in run_ranks(send_distributed, 2, timeout=60):
        assert "the last layer of a stage returns a DTensor" in said
    for found in run_ranks(refusals, 2, timeout=90):
        for said, (*_, expected) in zip(found, REFUSED, strict=True):
            assert re.search(expected, said), said
    with pytest.raises(InputError, match="tensor_parallel must be at least 1, got 0"):
        PipelineStrategy(tensor_parallel=0)
