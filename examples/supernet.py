"""Search for a small network: `python examples/supernet.py` trains a supernet for the digits of scikit-learn.

The supernet is trained in a pipeline of two processes, which trains many subnets at the same time and gives the same
result as training one subnet after another. The script then tries subnets by random search, by evolution and with
Optuna, trains the best subnet again from scratch, and saves a picture of the search.

`data=stdlib trainer.max_epochs=5 retrain.epochs=5` does the same for a language model on the bytes of Python's source
text, whose blocks choose between attention, convolutions and feed-forward layers. All settings are in
conf/supernet.yaml.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
import torch.nn.functional as F
from hydra.core.hydra_config import HydraConfig
from models import Embedding
from omegaconf import DictConfig, OmegaConf
from optuna.samplers import TPESampler
from plots import Tried, save_search
from settings import register
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.supernets import ChoiceBlock, Evolution, Explorer, OptunaExplorer, SubnetStream, Supernet, Uniform
from lightning_pipes.tune.messages import plain_errors

HIDDEN = (8, 16, 32, 64, 128)
"""The hidden widths of the feed-forward candidates for digits."""
HEADS = 4


class Residual(nn.Module):
    """Applies `body` to the normalized input, and adds the result to the input."""

    def __init__(self, width: int, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(width), *body, nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)  # type: ignore[no-any-return]


def feed_forward(width: int, hidden: int) -> Residual:
    return Residual(width, nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Convolution(nn.Module):
    """A separable convolution over the last `kernel` bytes, which preserves the shape (batch, context, width)."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.past = kernel - 1
        self.each, self.mix = nn.Conv1d(width, width, kernel, groups=width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.each(F.pad(x.mT, (self.past, 0))).mT)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal self-attention, which preserves the shape (batch, context, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        q, k, v = self.qkv(x).view(batch, context, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mix(seen.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


def candidates(width: int, context: int) -> list[nn.Module]:
    """Return the layers among which a block chooses. The first one does nothing, and the last one has the most
    parameters."""
    if not context:
        return [nn.Identity(), *(feed_forward(width, hidden) for hidden in HIDDEN)]
    mixing = (Convolution(width, 3), Convolution(width, 7), Attention(width))
    return [
        nn.Identity(),
        feed_forward(width, width),
        *(Residual(width, each) for each in mixing),
        feed_forward(width, 4 * width),
    ]


def supernet(width: int, blocks: int, shared: Any, delay: int | None, context: int = 0) -> Supernet:
    """Return the supernet for digits, or for windows of `context` bytes if `context` is not zero."""
    if context:
        stem: nn.Module = Embedding(context, width, 0.1)
    else:
        stem = nn.Sequential(nn.Flatten(), nn.Linear(64, width))
    choices = (ChoiceBlock(candidates(width, context)) for _ in range(blocks))
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256 if context else 10))
    return Supernet(stem, *choices, head, shared=shared, delay=delay if shared == "delayed" else None)


class Trained(L.LightningModule):
    """An ordinary LightningModule that trains `net`, or the subnet of each batch if batches contain one."""

    def __init__(self, net: nn.Sequential, lr: float) -> None:
        super().__init__()
        self.net, self.lr = net, lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x, y), *subnet = batch if isinstance(batch[0], (list, tuple)) else (batch,)
        scores = self.net((x, *subnet) if subnet else x)
        loss = F.cross_entropy(scores.flatten(0, -2), y.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class TrainedSupernet(Trained):
    def layers_of_batch(self, batch: Any) -> Any:  # the only method that the pipeline needs
        return self.net.layers_of(batch[-1])  # type: ignore[operator]


def accuracy(net: nn.Module, given: Any, labels: Tensor) -> float:
    with torch.no_grad():
        return float((net(given).argmax(-1) == labels).float().mean())


def search(
    name: str, explorer: Explorer, net: Supernet, inputs: Tensor, labels: Tensor, cfg: DictConfig
) -> list[Tried]:
    """Return the subnets that an explorer tries, evaluated with the weights of the supernet."""
    stream, found = SubnetStream(explorer), []
    dearest = parameters(net, [block[-1] for block in net.space])
    for _ in range(cfg.subnets):
        subnet = next(stream)
        right, cost = accuracy(net, (inputs, subnet), labels), parameters(net, subnet.choices)
        stream.report_loss(subnet, 1 - right + cfg.price * cost / dearest)
        found.append(Tried(name, subnet.choices, right, cost, right - cfg.price * cost / dearest))
    return found


def parameters(net: Supernet, choices: Any) -> int:
    return sum(p.numel() for p in net.extract_subnet(choices).parameters())


@hydra.main(version_base="1.3", config_path="conf", config_name="supernet")
def main(cfg: DictConfig) -> None:
    for noise in (".*does not have many workers.*", ".*LeafSpec.*is deprecated.*", ".*hyperparameter.*"):
        warnings.filterwarnings("ignore", noise)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    directory = Path(HydraConfig.get().runtime.output_dir)
    L.seed_everything(cfg.seed, verbose=False)
    data: Any = hydra.utils.instantiate(cfg.data)
    data.setup("fit")
    sizes = {**cfg.supernet, "context": cfg.data.get("context", 0)}
    net = supernet(**sizes)
    stream = SubnetStream(Uniform(net.space, cfg.seed))

    strategy = PipelineStrategy(hydra.utils.instantiate(cfg.schedule), **OmegaConf.to_container(cfg.pipeline))  # type: ignore[arg-type]
    trainer = L.Trainer(strategy=strategy, **quiet(cfg.trainer, directory))
    trainer.fit(TrainedSupernet(net, cfg.optimizer.lr), stream.pair_with(data.train_dataloader()))

    inputs, labels = next(iter(DataLoader(data.val, len(data.val))))
    net.eval()
    explorers = {
        "by chance": Uniform(net.space, cfg.seed + 1),
        "evolution": Evolution(net.space, cfg.search.population, max(1, cfg.search.population // 5), seed=cfg.seed),
        "Optuna": OptunaExplorer(net.space, lambda: TPESampler(seed=cfg.seed), cfg.search.population),
    }
    tried = {name: search(name, each, net, inputs, labels, cfg.search) for name, each in explorers.items()}
    best = max((t for found in tried.values() for t in found), key=lambda t: t.worth)

    L.seed_everything(cfg.seed, verbose=False)
    alone = Trained(supernet(**sizes).extract_subnet(best.choices), cfg.optimizer.lr)
    again = L.Trainer(
        strategy=PipelineStrategy("1f1b", **OmegaConf.to_container(cfg.pipeline)),  # type: ignore[arg-type]
        **quiet(cfg.trainer, directory) | {"max_epochs": cfg.retrain.epochs},
    )
    again.fit(alone, data.train_dataloader())
    alone.eval()
    retrained = accuracy(alone.net, inputs, labels)

    if trainer.is_global_zero:
        report = strategy.report
        print(f"supernet    {trainer.global_step} subnets trained, one per batch, of {net.space.size} possible subnets")
        print(f"bubble      {report.bubble_measured:.1%}, measured")
        for name, found in tried.items():
            top = max(found, key=lambda t: t.worth)
            print(f"{name:11} accuracy {top.accuracy:.1%} with {top.cost} parameters: {top.choices}")
        print(f"retrained   accuracy {retrained:.1%} of {best.choices} ({best.by})")
        save_search(tried, best, retrained, report.measured, directory / "supernet.png")
        print(f"picture     {directory / 'supernet.png'}")


def quiet(trainer: DictConfig, directory: Path) -> dict[str, Any]:
    options: dict[str, Any] = OmegaConf.to_container(trainer)  # type: ignore[assignment]
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return {**off, "default_root_dir": directory, **options}


if __name__ == "__main__":
    register()
    with plain_errors():
        main()
