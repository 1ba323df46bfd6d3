"""Every feature of the strategy for modules that are cut by units, on two or three processes and on one.

The modules have no container that works alone: a U-Net, whose skips cross all stages, and a decoder, whose blocks get a
mask and positions. `REFUSED` lists the features that they do not have, with the reasons.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import MemorySwap, PipelineStrategy
from lightning_pipes.arrays.array import JobArray
from lightning_pipes.ir import PipelineError, PlanError
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import differences, plain_values, quiet
from tests.trainers import make_trainer

ROWS, LENGTH, WIDTH = 8, 8, 4


class Fixed(nn.Linear):
    """A linear layer that initializes its weights without random numbers, so that they are equal after `meta`."""

    def reset_parameters(self) -> None:
        n, m = self.weight.shape
        values = torch.arange(1, n * m + 1, dtype=self.weight.dtype, device=self.weight.device)
        with torch.no_grad():
            self.weight.copy_((values.sin() / m**0.5).view(n, m))
            self.bias.zero_()


class Small(pl.LightningModule):
    """A module whose layers are made in `configure_model`, on `meta` or compiled if this is requested."""

    on_meta = False
    compiles = False

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            usual = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)  # weights that are initialized on `meta` are not rounded before
            with torch.device("meta" if self.on_meta else "cpu"):
                self.make_layers()
            torch.set_default_dtype(usual)
            for layer in self.list_layers() if self.compiles else ():
                layer.compile(backend="eager")

    def list_layers(self) -> list[nn.Module]:
        return [*self.children()]

    def make_layers(self) -> None:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class UNet(Small):
    """Layers as attributes, of which the late ones read what the early ones have left."""

    def make_layers(self) -> None:
        for n in range(3):
            setattr(self, f"down{n}", Fixed(WIDTH, WIDTH))
            setattr(self, f"up{n}", Fixed(2 * WIDTH, WIDTH))
        self.middle, self.norm, self.head = Fixed(WIDTH, WIDTH), nn.LayerNorm(WIDTH), Fixed(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for n in range(3):
            x = getattr(self, f"down{n}")(x).tanh()
            skips.append(x)
            x = F.avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2)
        x = self.norm(self.middle(x))
        for n in range(3):
            x = torch.cat([x.repeat_interleave(2, 1), skips.pop()], 2)
            x = getattr(self, f"up{n}")(x).tanh()
        return self.head(x)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(WIDTH), Fixed(WIDTH, 3 * WIDTH), Fixed(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x) * positions).chunk(3, 2)
        return x + self.out((q @ k.transpose(1, 2) + mask).softmax(-1) @ v)  # type: ignore[no-any-return]


class Decoder(Small):
    """Blocks in a loop, which get a mask and positions, and whose first result is added to the last one."""

    def make_layers(self) -> None:
        self.embed, self.head = Fixed(WIDTH, WIDTH), Fixed(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def list_layers(self) -> list[nn.Module]:
        return [*self.blocks]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.full((LENGTH, LENGTH), -1e4, dtype=x.dtype).triu(1)
        positions = torch.arange(LENGTH, dtype=x.dtype).cos()[:, None]
        first = x = self.embed(x)
        for block in self.blocks:
            x = block(x, positions, mask)
        return self.head(x + first)  # type: ignore[no-any-return]


class NamesLayers(Decoder):
    """A module that names the layers of a batch, and also trains layers outside of them."""

    def layers_of_batch(self, batch: Any) -> list[str]:
        return ["0", "1", "2", "3"]


class NamesNothing(UNet):
    """A module that names layers, although it has no container of layers."""

    def layers_of_batch(self, batch: Any) -> list[str]:
        return ["0"]


class Shards(UNet):
    """A module whose first layer is sharded over replicas, or over the ranks of a stage."""

    def configure_model(self) -> None:
        super().configure_model()
        if self.device_mesh is not None and self.device_mesh["tensor_parallel"].size() > 1:
            parallelize_module(self.down0, self.device_mesh["tensor_parallel"], ColwiseParallel())
        elif self.device_mesh is not None:
            fully_shard(self.down0, mesh=self.device_mesh["data_parallel"])


BORDERS = {UNet: ["down1", "up1"], Decoder: ["blocks.1", "blocks.3"]}


def settings_of(kind: type[Small], ranks: int) -> dict[str, dict[str, Any]]:
    """Return the settings of the strategy for each feature."""
    plain: dict[str, Any] = {"schedule": "1f1b", "microbatches": 4, "module": ""}
    names = BORDERS[kind][: ranks - 1]
    found: dict[str, dict[str, Any]] = {
        "auto": {"schedule": "auto", "module": ""},
        "recompute": plain | {"recompute": True},
        "verify": plain | {"verify": 2},
        "named partition": plain | {"partition": names},
        "replanning": plain | {"replan": {"every": 1}},
        "unequal micro-batches": {
            "schedule": "umpipe",
            "schedule_args": {"forward": (2, 4, 1)[:ranks], "backward": (4, 2, 8)[:ranks]},
            "partition": names,
        },
        "csp": {"schedule": "csp", "module": ""},
        "meta": plain | {"partition": names},
        "compiled": plain | {"partition": names},
    }
    if kind is Decoder:
        found["numbered partition"] = plain | {"partition": [1, 3][: ranks - 1]}
    if ranks == 3:
        found["two ranks in the first stage"] = plain | {"data_parallel": [2, 1]}
        found["two ranks in the last stage"] = plain | {"data_parallel": [1, 2]}
    return found


REFUSED: dict[str, tuple[type[Small], dict[str, Any], tuple[Any, ...], str]] = {
    "layers_of_batch with weights outside of the layers": (NamesLayers, {"schedule": "csp", "module": ""}, (), "embed"),
    "layers_of_batch without layers": (NamesNothing, {"schedule": "csp"}, (), "layers_of_batch without any"),
    "numbers without a container": (UNet, {"partition": [1], "module": ""}, (), "no container of layers to count in"),
    "verify with csp": (UNet, {"schedule": "csp", "verify": 1}, (), "verify with schedule 'csp'"),
    "auto with unequal replicas": (UNet, {"schedule": "auto", "data_parallel": [1, 1]}, (), "chooses the number of st"),
    "unequal micro-batches on meta": (
        UNet,
        {"schedule": "umpipe", "schedule_args": {"forward": (2, 4)}, "partition": ["down1"]},
        (),
        "weights are on meta",
    ),
    "fully_shard": (
        Shards,
        {"data_parallel": 2},
        (),
        "sharded layers and would be cut by units, which can't be sharded",
    ),
    "parallelize_module": (Shards, {"tensor_parallel": 2}, (), "which can't be sharded"),
    "MemorySwap with a schedule that has one version": (
        UNet,
        {"module": ""},
        (MemorySwap(10**6),),
        "'1f1b' has neither",
    ),
}
"""The features that modules that are cut by units do not have."""


def fit(kind: type[Small], strategy: Any, ranks: int, name: str = "", callbacks: Any = ()) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    module = kind()
    module.on_meta, module.compiles = "meta" in name, name == "compiled"
    x = torch.randn(3 * ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer = make_trainer(devices=ranks, strategy=strategy, max_epochs=2, callbacks=[*callbacks])
    trainer.fit(module, DataLoader(TensorDataset(x, x.roll(1, 1).sin()), batch_size=ROWS))
    here = {name: t for name, t in module.state_dict().items() if not t.is_meta}  # weights on meta stay on their ranks
    return plain_values({**here, **trainer.callback_metrics})


def fit_sibling(kind: type[Small], ranks: int) -> dict[str, Any]:
    return fit(kind, PipelineStrategy("1f1b", microbatches=2, partition=BORDERS[kind][: ranks - 1]), ranks)


def fit_all(rank: int, kind: type[Small], ranks: int) -> dict[str, Any]:
    quiet()
    found: dict[str, Any] = {}
    for name, settings in settings_of(kind, ranks).items():
        found[name] = fit(kind, PipelineStrategy(**settings), ranks, name)
    for outcome in JobArray[Any](2).run([partial(fit_sibling, kind, ranks)] * 2):
        found[f"sibling {outcome.index}"] = outcome.value
    return found


def refuse(rank: int) -> dict[str, str]:
    quiet()
    found = {}
    for name, (kind, settings, callbacks, _) in REFUSED.items():
        with pytest.raises((PipelineError, PlanError)) as error:
            fit(kind, PipelineStrategy(**settings), 2, name, callbacks)
        found[name] = str(error.value)
    return found


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [(UNet, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((Decoder, 2), (UNet, 3), (Decoder, 3)))],
    ids=lambda value: getattr(value, "__name__", f"{value} ranks"),
)
def test_features_give_the_results_of_one_process(kind: type[Small], ranks: int) -> None:
    expected = fit(kind, "auto", 1)
    for rank, found in enumerate(run_ranks(fit_all, ranks, kind, ranks, timeout=400)):
        assert {*settings_of(kind, ranks), "sibling 0", "sibling 1"} == {*found}
        for name, values in found.items():
            whole = {key: expected[key] for key in values} if name == "meta" else expected
            assert differences(whole, values, 1e-10, f"{name}, rank {rank}") == []


def test_features_that_do_not_exist_are_refused_by_name() -> None:
    for found in run_ranks(refuse, 2, timeout=300):
        assert found.keys() == REFUSED.keys()
        for name, (*_, part) in REFUSED.items():
            assert part in found[name], name
