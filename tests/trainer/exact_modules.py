"""Small modules, similar to public code, that train in micro-batches exactly as in one process."""

from __future__ import annotations

from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WIDTH, HEADS, CLASSES, ROWS = 8, 2, 3, 22
"""Batches have 8, 8 and 6 samples."""
MODULES: list[type[Exact]] = []
"""All subclasses of `Exact`."""


def loader(*shape: int, rows: int = ROWS, size: int = 8) -> DataLoader[Any]:
    """Return a loader of samples with the given shape, each with a label, a weight and a length."""
    g = torch.Generator().manual_seed(1)
    x, weights = torch.randn(rows, *shape, generator=g).double(), torch.rand(rows, generator=g).double()
    y = torch.randint(0, CLASSES, (rows,), generator=g)
    lengths = torch.randint(1, shape[0] + 1, (rows,), generator=g)
    return DataLoader(TensorDataset(x, y, weights, lengths), batch_size=size)


class Exact(pl.LightningModule):
    """Base class of modules whose weights after training in micro-batches equal the weights of one process.

    Attributes:
        shape: the shape of a sample.
        strategy: arguments of the strategy that the module needs.
        by_units: whether the module is cut by units.
        is_random: whether the module draws random numbers, so that its weights differ from the weights of one process.
    """

    shape: tuple[int, ...] = (WIDTH,)
    strategy: ClassVar[dict[str, Any]] = {}
    by_units, is_random = False, False

    def __init_subclass__(cls) -> None:
        MODULES.append(cls)

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module = nn.Sequential(*(dense() for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.build()

    def build(self) -> None:
        """Replace the default layers; subclasses override this method."""

    def loader(self) -> Any:
        return loader(*self.shape)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, *_ = batch
        loss = F.cross_entropy(self.head(self.features(x)), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def dense(norm: type[nn.Module] | None = None) -> nn.Sequential:
    """Return a linear layer with an optional norm and a GELU."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *([] if norm is None else [norm(WIDTH)]), nn.GELU())


def encoder(batch_first: bool, dropout: float = 0.0) -> nn.TransformerEncoderLayer:
    """Return a small transformer encoder layer."""
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=dropout, batch_first=batch_first)


class SequenceFirst(Exact):
    """A transformer on inputs of shape (T, B, C) with as many tokens as a micro-batch has samples."""

    shape = (2, WIDTH)

    def build(self) -> None:
        self.net = nn.Sequential(*(encoder(False) for _ in range(4)))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.transpose(0, 1)).mean(0)


class LongSequenceFirst(SequenceFirst):
    """A transformer with as many tokens as a batch has samples, and with layers in a loop."""

    shape = (8, WIDTH)

    def build(self) -> None:
        self.net = nn.ModuleList(encoder(False) for _ in range(4))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1)
        for layer in self.net:
            x = layer(x)
        return x[0]


class Flattened(Exact):
    """A module whose layers get inputs of shape (B * T, C)."""

    shape = (4, WIDTH)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.reshape(-1, WIDTH)).view(len(x), -1, WIDTH).mean(1)


class TwoViews(Exact):
    """SimSiam without batch normalization, with both views in one call."""

    def build(self) -> None:
        self.predictor = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, WIDTH))
        del self.head

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0]
        z = self.net(torch.cat([x, x.flip(-1)]))
        first, second = z.chunk(2)
        p, q = self.predictor(z).chunk(2)
        similarity = F.cosine_similarity(p, second.detach()).mean() + F.cosine_similarity(q, first.detach()).mean()
        self.log("similarity", similarity)
        return -similarity / 2


class TwoCalls(TwoViews):
    """SimSiam with one call per view, which is cut by units."""

    by_units = True

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0]
        first, second = self.net(x), self.net(x.flip(-1))
        p, q = self.predictor(first), self.predictor(second)
        return -(F.cosine_similarity(p, second.detach()).mean() + F.cosine_similarity(q, first.detach()).mean()) / 2


class MaskedLayer(nn.Module):
    """An attention layer that passes its mask on to the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Any) -> Any:
        x, mask = x
        return self.norm(x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]), mask


class HeadMasks(Exact):
    """Attention layers with masks of shape (B * heads, T, T)."""

    shape = (4, WIDTH)

    def build(self) -> None:
        self.net = nn.Sequential(*(MaskedLayer() for _ in range(4)))

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        padding = (x[:, :, 0] < -0.5).index_fill(1, torch.tensor([0]), False)
        return padding[:, None, :].expand(-1, x.size(1), -1).repeat_interleave(HEADS, 0)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.net((x, self.mask(x)))[0].mean(1)


class CausalMask(HeadMasks):
    """Attention layers with a (T, T) mask that has as many rows as a micro-batch has samples."""

    shape = (2, WIDTH)

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Transformer.generate_square_subsequent_mask(x.size(1), dtype=x.dtype)


class RotaryLayer(nn.Module):
    """A layer that rotates its input by two tables and passes the tables on to the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        x, cos, sin = x
        half = torch.cat([-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]], -1)
        return torch.tanh(self.map(x * cos + half * sin)), cos, sin


class Rotary(Exact):
    """Layers with tables of rotary embeddings that have as many rows as a micro-batch has samples."""

    shape = (2, WIDTH)

    def build(self) -> None:
        self.net = nn.Sequential(*(RotaryLayer() for _ in range(4)))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.size(1), dtype=x.dtype)[:, None] / torch.arange(1, WIDTH + 1, dtype=x.dtype)
        return self.net((x, angles.cos(), angles.sin()))[0].mean(1)


class UnequalLoaders(Exact):
    """A module that joins labeled and unlabeled samples from loaders with different batch sizes in one call."""

    def loader(self) -> Any:
        return CombinedLoader([loader(WIDTH), loader(WIDTH, rows=60, size=16)], "min_size")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, unlabelled = batch[0][0], batch[0][1], batch[1][0]
        logits = self.head(self.net(torch.cat([x, unlabelled])))
        labelled, other = logits[: len(x)], logits[len(x) :]
        return F.cross_entropy(labelled, y) + 0.1 * other.pow(2).mean()


class Dropouts(Exact):
    """Dropout before, in and after the layers.

    The random numbers differ from the numbers of one process, but the distribution of the training does not.
    """

    is_random = True
    shape = (4, WIDTH)

    def build(self) -> None:
        self.net = nn.Sequential(*(encoder(True, 0.2) for _ in range(4)))
        self.drop = nn.Dropout(0.2)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.net(self.drop(x)).mean(1))


class IndexedBatch(Exact):
    """A module whose batches are in a list in a dict."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        batch = {"inputs": [batch], "name": "train"}
        x, y = batch["inputs"][0][0], batch["inputs"][0][1]
        self.log("width", float(x[0].numel()))
        return F.cross_entropy(self.head(self.net(x)), y)


class Heads(nn.Module):
    """A last layer that returns the outputs of several tasks in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks = nn.ModuleDict({"label": nn.Linear(WIDTH, CLASSES), "weight": nn.Linear(WIDTH, 1)})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: task(x) for name, task in self.tasks.items()}


class MultiTask(Exact):
    """A module whose layers and training step return dicts."""

    def build(self) -> None:
        self.net = nn.Sequential(*(dense() for _ in range(3)), Heads())
        del self.head

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, weights, _ = batch
        out = self.net(x)
        losses = {"label": F.cross_entropy(out["label"], y), "weight": F.mse_loss(out["weight"][:, 0], weights)}
        self.log_dict(losses)
        return {
            "loss": losses["label"] + 0.5 * losses["weight"],
            **{f"{k}_loss": v.detach() for k, v in losses.items()},
        }


class WeightedSamples(Exact):
    """A mean over samples whose losses have weights."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, weights, _ = batch
        return (F.cross_entropy(self.head(self.net(x)), y, reduction="none") * weights).mean()


class WeightedMean(Exact):
    """A mean weighted by samples, whose `microbatch_weight` returns the weight of a micro-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, weights, _ = batch
        losses = F.cross_entropy(self.head(self.net(x)), y, reduction="none")
        return (losses * weights).sum() / weights.sum()

    def microbatch_weight(self, batch: Any) -> torch.Tensor:
        return batch[2].sum()


class Smoothed(Exact):
    """A loss with label smoothing."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, *_ = batch
        return F.cross_entropy(self.head(self.net(x)), y, label_smoothing=0.1)


class Averaged(Exact):
    """A module that keeps a running average of the loss in a buffer."""

    def build(self) -> None:
        self.register_buffer("average", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, *_ = batch
        loss = F.cross_entropy(self.head(self.net(x)), y)
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss


class Norms(Exact):
    """Layers with LayerNorm, RMSNorm and GroupNorm."""

    def build(self) -> None:
        groups = [nn.Sequential(nn.GroupNorm(HEADS, WIDTH), dense())]
        self.net = nn.Sequential(dense(nn.LayerNorm), dense(nn.RMSNorm), *groups, dense(nn.LayerNorm))


class Patches(Exact):
    """A vision transformer with patches, a class token and positions before the layers."""

    shape = (3, 8, 8)

    def build(self) -> None:
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH) * 0.02)
        self.net = nn.Sequential(*(encoder(True) for _ in range(4)))
        self.norm = nn.LayerNorm(WIDTH)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.positions
        return self.norm(self.net(tokens)[:, 0])


class Skips(Exact):
    """A U-Net."""

    by_units = True
    shape = (3, 8, 8)

    def build(self) -> None:
        self.down1, self.down2 = nn.Conv2d(3, WIDTH, 3, 1, 1), nn.Conv2d(WIDTH, WIDTH, 3, 2, 1)
        self.middle = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, 1, 1), nn.GroupNorm(2, WIDTH), nn.SiLU())
        self.up1, self.up2 = nn.ConvTranspose2d(WIDTH, WIDTH, 2, 2), nn.Conv2d(2 * WIDTH, 3, 3, 1, 1)
        del self.net, self.head

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0]
        first = F.silu(self.down1(x))
        out = self.up1(self.middle(F.silu(self.down2(first))))
        return F.mse_loss(self.up2(torch.cat([first, out], 1)), x.flip(-1))


class PaddedLayer(nn.Module):
    """A transformer layer that passes its padding mask on to the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = encoder(True)

    def forward(self, x: Any) -> Any:
        x, padding = x
        return self.layer(x, src_key_padding_mask=padding), padding


class PaddedSequences(Exact):
    """Classification of sequences with different lengths by a mean over the tokens that are not padding."""

    shape = (4, WIDTH)

    def build(self) -> None:
        self.net = nn.Sequential(*(PaddedLayer() for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, _, lengths = batch
        padding = torch.arange(x.size(1))[None] >= lengths[:, None]
        hidden, _ = self.net((x, padding))
        kept = (~padding).to(hidden.dtype)[:, :, None]
        return F.cross_entropy(self.head((hidden * kept).sum(1) / kept.sum(1)), y)


class PaddedTokens(Exact):
    """Classification of tokens, with some labels ignored."""

    by_units = True
    shape = (4, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, _, lengths = batch
        labels = y[:, None].expand(-1, x.size(1))
        labels = labels.masked_fill(torch.arange(x.size(1))[None] >= lengths[:, None], -100)
        return F.cross_entropy(self.head(self.net(x)).flatten(0, 1), labels.flatten())


class Triplets(Exact):
    """A triplet loss of the three vectors in each sample."""

    shape = (3, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        anchor, near, far = self.net(batch[0]).unbind(1)
        return F.triplet_margin_loss(anchor, near, far)


class Penalty(Exact):
    """A gradient penalty with manual optimization."""

    strategy: ClassVar[dict[str, Any]] = {"microbatches": None}
    by_units = True

    def build(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y, *_ = batch
        x = x.clone().requires_grad_()
        out = self.head(self.net(x))
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = F.cross_entropy(out, y) + 0.1 * (gradient.norm(dim=1) - 1).pow(2).mean()
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Forces(Exact):
    """A model with a layer that returns the gradient of an energy."""

    def build(self) -> None:
        self.net = nn.Sequential(dense(), dense(), Energy(), dense())


class Energy(nn.Module):
    """A layer that returns the gradient of an energy with respect to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.clone().requires_grad_()
            energy = torch.tanh(self.map(x)).pow(2).sum()
            return torch.autograd.grad(energy, x, create_graph=self.training)[0]


class RecurrentLayer(nn.Module):
    """An LSTM that returns its outputs without its state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]


class Recurrent(Exact):
    """A model of LSTM layers."""

    shape = (4, WIDTH)

    def build(self) -> None:
        self.net = nn.Sequential(*(RecurrentLayer() for _ in range(4)))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)[:, -1]


class ExpertLayer(nn.Module):
    """A layer that sends each token through the expert chosen by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, WIDTH)
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            (at,) = torch.where(chosen == number)
            out.index_add_(0, at, expert(tokens[at]) * weight[at, None])
        return x + out.view_as(x)


class Experts(Exact):
    """A mixture of experts without a limit on their capacity."""

    shape = (4, WIDTH)

    def build(self) -> None:
        self.net = nn.Sequential(*(ExpertLayer() for _ in range(4)))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).mean(1)


class Distilled(Exact):
    """A student with a smaller, frozen teacher."""

    def build(self) -> None:
        self.teacher = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, CLASSES)).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, *_ = batch
        logits = self.head(self.net(x))
        with torch.no_grad():
            target = self.teacher(x).softmax(1)
        return F.cross_entropy(logits, y) + F.kl_div(logits.log_softmax(1), target, reduction="batchmean")


class LargeTeacher(Distilled):
    """A student with a frozen teacher that is several times as large."""

    by_units = True

    def build(self) -> None:
        wide = [nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.ReLU(), nn.Linear(8 * WIDTH, WIDTH)) for _ in range(3)]
        self.teacher = nn.Sequential(*wide, nn.Linear(WIDTH, CLASSES)).requires_grad_(False).eval()


class FrozenBackbone(Exact):
    """A trained head on frozen layers."""

    by_units = True

    def build(self) -> None:
        self.net = nn.Sequential(*(dense(nn.LayerNorm) for _ in range(6))).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(WIDTH, 4), nn.GELU(), nn.Linear(4, CLASSES))


class FrozenAfterProjection(Exact):
    """Frozen layers that pass gradients to a trained projection, as in vision-language models."""

    def build(self) -> None:
        self.projection = nn.Sequential(nn.Linear(WIDTH, 4), nn.GELU(), nn.Linear(4, WIDTH))
        self.net = nn.Sequential(*(dense(nn.LayerNorm) for _ in range(6))).requires_grad_(False)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.projection(x))


class SimCLR(Exact):
    """One encoder with both views in one call, and a loss that compares all samples."""

    by_units = True

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0]
        z = F.normalize(self.net(torch.cat([x, x.flip(-1)])), dim=1)
        similar = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return F.cross_entropy(similar, torch.arange(len(z)).roll(len(x)))


class Pyramid(Exact):
    """Layers that pass on a list of features at several resolutions."""

    shape = (3, 8, 8)

    def build(self) -> None:
        self.net = nn.Sequential(PyramidLayer(3), PyramidLayer(WIDTH), PyramidLayer(WIDTH))
        self.head = nn.Linear(3 * WIDTH, CLASSES)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([each.mean((2, 3)) for each in self.net([x])[1:]], 1)


class PyramidLayer(nn.Module):
    """A layer that appends features at half of the last resolution to its list of inputs."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.map = nn.Conv2d(channels, WIDTH, 3, 2, 1)

    def forward(self, x: list[torch.Tensor]) -> list[torch.Tensor]:
        return [*x, F.silu(self.map(x[-1]))]


class Autoencoder(Exact):
    """A variational autoencoder without noise, whose divergence is summed over features and averaged over samples."""

    def build(self) -> None:
        self.net = nn.Sequential(dense(), nn.Linear(WIDTH, 6))
        self.decoder = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        del self.head

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        mean, variance = self.net(batch[0]).chunk(2, 1)
        divergence = -0.5 * (1 + variance - mean.pow(2) - variance.exp()).sum(1).mean()
        return F.mse_loss(self.decoder(mean), batch[0]) + 0.1 * divergence


class Focal(Exact):
    """A focal loss: the mean of the cross-entropy losses of samples, each weighted by its own value."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, *_ = batch
        losses = F.cross_entropy(self.head(self.net(x)), y, reduction="none")
        return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


class Towers(Exact):
    """CLIP: two towers of equal size, and a loss that compares each sample with all others."""

    by_units = True

    def build(self) -> None:
        self.text = nn.Sequential(*(dense() for _ in range(4)))
        self.scale = nn.Parameter(torch.tensor(1.0))
        del self.head

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0]
        images, texts = F.normalize(self.net(x), dim=1), F.normalize(self.text(x.flip(-1)), dim=1)
        logits = self.scale.exp() * images @ texts.T
        labels = torch.arange(len(x))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class UnequalTowers(Towers):
    """CLIP with a large image tower and a small text tower."""

    def build(self) -> None:
        super().build()
        self.net = nn.Sequential(*(dense() for _ in range(12)))
        self.text = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class LoopTowers(Towers):
    """CLIP whose towers are nested modules that run their layers in loops."""

    def build(self) -> None:
        super().build()
        self.net, self.text = LoopTower(), LoopTower()


class LoopTower(nn.Module):
    """A tower that runs its layers in a loop with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(dense(nn.LayerNorm) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x
