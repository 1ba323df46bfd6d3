"""Plain modules in common styles, none of which has a single container of layers that is called in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WORDS, LENGTH, WIDTH = 64, 8, 16


class Case(NamedTuple):
    """A model, a batch, and a step that returns the loss."""

    model: nn.Module
    batch: Any
    step: Callable[[nn.Module, Any], torch.Tensor]


CASES: dict[str, Callable[[], Case]] = {}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(rows: int = 8, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=generator(), dtype=torch.float64)


def labels(rows: int = 8, classes: int = 4) -> torch.Tensor:
    return torch.arange(rows) % classes


def words(seed: int = 0, rows: int = 8) -> torch.Tensor:
    return torch.randint(3, WORDS, (rows, LENGTH), generator=generator(seed))


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def add(
    name: str,
    make: Callable[[], nn.Module],
    batch: Callable[[], tuple[torch.Tensor, ...]] = lambda: (numbers(), labels()),
    step: Callable[[nn.Module, Any], torch.Tensor] = classify,
) -> None:
    def build() -> Case:
        torch.manual_seed(0)
        return Case(make().double().train(), batch(), step)

    CASES[name] = build


def perceptron(out: int = 4, layers: int = 3, width: int = WIDTH) -> nn.Sequential:
    widths = [width, *[WIDTH] * layers]
    hidden = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, out))


class NineLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number in range(1, 10):
            setattr(self, f"fc{number}", nn.Linear(WIDTH, WIDTH if number < 9 else 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(1, 9):
            x = torch.relu(getattr(self, f"fc{number}")(x))
        return self.fc9(x)


class UNet(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        a, b, c, d = width, 2 * width, 4 * width, 8 * width
        self.inc, self.out = self.block(3, a), nn.Conv2d(a, 4, 1)
        self.down1, self.down2, self.down3 = self.block(a, b), self.block(b, c), self.block(c, d)
        self.up1, self.up2 = nn.ConvTranspose2d(d, c, 2, 2), nn.ConvTranspose2d(c, b, 2, 2)
        self.up3 = nn.ConvTranspose2d(b, a, 2, 2)
        self.conv1, self.conv2, self.conv3 = self.block(d, c), self.block(c, b), self.block(b, a)
        self.inc[1] = NormAndAct(a)

    @staticmethod
    def block(before: int, after: int) -> nn.Sequential:
        first, second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        return nn.Sequential(first, nn.BatchNorm2d(after), nn.ReLU(inplace=True), second, nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.inc(x)
        b = self.down1(F.max_pool2d(a, 2))
        c = self.down2(F.max_pool2d(b, 2))
        d = self.down3(F.max_pool2d(c, 2))
        x = self.conv1(torch.cat([c, self.up1(d)], 1))
        x = self.conv2(torch.cat([b, self.up2(x)], 1))
        return self.out(self.conv3(torch.cat([a, self.up3(x)], 1))).mean((2, 3))


class NormAndAct(nn.BatchNorm2d):
    """Batch normalization with an activation, in a module that calls a function."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.act = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_batches_tracked.add_(1)
        mean, var = self.running_mean, self.running_var
        return self.act(F.batch_norm(x, mean, var, self.weight, self.bias, True, self.momentum, self.eps))


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn1, self.bn2, self.relu = nn.BatchNorm2d(after), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Residual(8, 8, 1), Residual(8, 8, 1))
        self.layer2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16, 1))
        self.layer3 = nn.Sequential(Residual(16, 32, 2), Residual(32, 32, 1))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.fc(torch.flatten(self.pool(self.layer3(self.layer2(self.layer1(x)))), 1))


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(8, 5)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.pairwise_distance(self.net(a), self.net(b))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = perceptron(WIDTH, 4)
        self.heads = nn.ModuleDict({"kind": perceptron(4, 2), "box": perceptron(3, 2), "mask": perceptron(2, 2)})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.trunk(x)
        return {name: head(hidden) for name, head in self.heads.items()}


def heads_step(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(batch[0])
    loss = F.cross_entropy(out["kind"], batch[1]) + F.mse_loss(out["box"], batch[0][:, :3])
    return loss + 0.1 * out["mask"].square().mean()


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 4)
        self.a, self.b = (nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.c = nn.GRU(WIDTH, WIDTH, 2, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, (n, c) = self.a(self.emb(x))
        h, _ = self.b(h, (n, c))
        return self.out(self.c(h)[0][:, -1])


class CellLoop(nn.Module):
    """Calls one cell for every time step, after an encoder and before a head."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.cell, self.head = perceptron(WIDTH), nn.LSTMCell(WIDTH, WIDTH), perceptron(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        encoded, state = self.enc(x), None
        for _ in range(5):
            state = self.cell(encoded, state)
        return self.head(state[0])


class TiedAutoencoder(nn.Module):
    """A module whose weights are used by functions instead of modules."""

    def __init__(self) -> None:
        super().__init__()
        made = [torch.randn(WIDTH, WIDTH, generator=generator()) / 4 for _ in range(4)]
        self.ws = nn.ParameterList([nn.Parameter(weight) for weight in made])
        self.scale, self.out = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # `double` returns the weights themselves, because they have this type already
        h, ws = x, [w.double() for w in self.ws]
        for w in ws:
            h = torch.tanh(F.linear(h, w)) * self.scale
        for w in reversed(ws):
            h = torch.tanh(F.linear(h, w.t()))
        return self.out(h)


@dataclasses.dataclass
class Out:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    n: int = 0


class DenseSkips(nn.Module):
    """A module whose layers receive the results of all layers before them, and which returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH * (i + 1), WIDTH) for i in range(6)])
        self.out = nn.Linear(WIDTH * 7, 4)

    def forward(self, x: torch.Tensor) -> Out:
        seen = [x]
        for layer in self.layers:
            seen.append(torch.tanh(layer(torch.cat(seen, 1))))
        return Out(self.out(torch.cat(seen, 1)), seen, len(seen))


class ItemFlow(nn.Module):
    """A module whose control flow depends on values of the batch and of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = perceptron(WIDTH, 2), perceptron(WIDTH, 2), perceptron(WIDTH, 2), perceptron()

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if (lengths > 0).all() and lengths.max().item() > 2:
            x = x * lengths.max().item()
        h = self.a(x)
        if h.mean().item() > 1e9:
            h = self.b(h)
        n = int(h.abs().argmax()) % 3 + 1
        h = self.c(h) * n
        return self.d(h[h[:, 0] > h[:, 0].min()])  # the length is not known in advance


class Training(nn.Module):
    """A module with dropout, batch normalization, buffers, autocast and other features of training.

    It also uses `if self.training`, `no_grad`, a checkpoint and changes in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.a, self.b, self.c, self.d = perceptron(WIDTH), perceptron(WIDTH), perceptron(WIDTH), perceptron()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("ema", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(x)
            x = x + 0.1 * torch.randn_like(x)
        h = self.drop(self.bn(self.a(x)))
        with torch.no_grad():
            self.ema.lerp_(h.mean(0).to(self.ema.dtype), 0.1)
        h = F.dropout(checkpoint(self.b, h, use_reentrant=False), 0.1, self.training)
        h.add_(1).clamp_(-3, 3)
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            h = self.c(h - self.ema)
        return self.d(h)


class Checkpoints(nn.Module):
    """Checkpoints in a row, which share a skip connection.

    A reentrant checkpoint hides its weights in an autograd.Function.
    """

    def __init__(self, dropout: float = 0.0, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inlet, self.scale = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([perceptron(WIDTH) for _ in range(4)])
        self.last, self.drop = perceptron(), nn.Dropout(dropout)

    def run_block(self, number: int, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(x))  # the first operation of the block, which depends only on the batch
        return self.drop(self.blocks[number](self.drop(x))[places]).tanh() + skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        skip = self.scale(x)
        for number in range(len(self.blocks)):
            x = checkpoint(self.run_block, number, x, skip, use_reentrant=self.reentrant)
        return checkpoint(self.last, x, use_reentrant=True)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope: float) -> torch.Tensor:
        ctx.slope = slope
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.slope, None


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + 0.5 * Sign.apply(x, 0.7)
        z = torch.fft.rfft(x)
        return self.out(torch.fft.irfft(z * torch.exp(1j * z.real), n=WIDTH))


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ls, self.out = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)]), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in self.ls:
            sums = torch.zeros_like(x)
            sums.index_add_(0, edges[1], x[edges[0]])
            degree = torch.bincount(edges[1], minlength=len(x)).clamp(min=1)
            x = torch.relu(layer(x + sums / degree[:, None]))
        return self.out(x)


class Translator(nn.Module):
    """The Transformer of torch, with masks and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.net = nn.Transformer(WIDTH, 2, 2, 2, 32, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor, *, pad: int = 0) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=torch.float64)
        padding = source == pad
        return self.out(
            self.net(
                self.emb(source), self.emb(target), tgt_mask=mask, tgt_is_causal=True, src_key_padding_mask=padding
            )
        )


class Experts(nn.Module):
    """Hand-written experts that are selected by index."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.gate, self.out = perceptron(WIDTH), nn.Linear(WIDTH, 4), perceptron()
        self.experts = nn.ModuleList([perceptron(WIDTH, 1) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        share, index = self.gate(h).softmax(-1).topk(2)  # topk returns a tuple type of torch
        share /= share.sum(-1, keepdim=True)
        y = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            at, place = (index == number).nonzero(as_tuple=True)
            if len(at):
                y[at] += expert(h[at]) * share[at, place, None]
        return self.out(h + y)


class Counting(nn.Module):
    """Stores a number in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.share = perceptron(WIDTH, 2), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        self.share = 0.5 + float(x.detach().square().mean())
        return x


class Writing(nn.Module):
    """Writes to a tensor of another module."""

    def __init__(self, notes: list[torch.Tensor]) -> None:
        super().__init__()
        self.layers, self.notes = perceptron(WIDTH, 2), notes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        self.notes[0][:] = x.detach().mean(0)
        return x


class Deferring(nn.Module):
    """Returns a function, which cannot be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        return self.layers(x), lambda later: 0.5 * later


class LeftBehind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.notes = [torch.zeros(WIDTH, dtype=torch.float64)]
        self.counting, self.writing, self.deferring = Counting(), Writing(self.notes), Deferring()
        self.middle, self.out = perceptron(WIDTH, 8), perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, halve = self.deferring(self.writing(self.counting(x)))
        return self.out(halve(self.middle(x)) * self.counting.share + self.notes[0])


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = perceptron(WIDTH, 4), perceptron(1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.g(x))


def gan_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the sum of the losses of generator and discriminator, for a single backward."""
    fake = model.g(torch.randn_like(batch[0]))
    loss = F.binary_cross_entropy_with_logits
    real, judged = model.d(batch[0]), model.d(fake.detach())
    of_d = loss(real, torch.ones_like(real)) + loss(judged, torch.zeros_like(judged))
    return of_d - loss(model.d(fake), torch.zeros_like(judged)) * 0.1


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        of = nn.utils.parametrizations
        self.a, self.b = of.weight_norm(nn.Linear(WIDTH, WIDTH)), of.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.c = nn.Sequential(of.orthogonal(nn.Linear(WIDTH, WIDTH)), nn.PReLU(), nn.Linear(WIDTH, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def images(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 3, 16, 16, generator=generator(), dtype=torch.float64), labels(rows)


add("nine linears", NineLinears)
add("u-net", UNet, images)
add("resnet by hand", ResNet, images)
add(
    "siamese",
    Siamese,
    lambda: (numbers(), numbers().flip(1), (labels() % 2).double()),
    lambda model, batch: F.mse_loss(model(batch[0], batch[1]), batch[2]),
)
add("multi-task heads", Heads, step=heads_step)
add("lstm and gru", Lstm, lambda: (words(), labels()))
add("cell in a time loop", CellLoop)
add("tied by functions", TiedAutoencoder)
add(
    "dense skips in a dataclass",
    DenseSkips,
    step=lambda model, batch: F.cross_entropy(model(batch[0]).logits, batch[1]),
)
add(
    ".item() control flow",
    ItemFlow,
    lambda: (numbers(), torch.arange(8) + 1, labels()),
    lambda model, batch: model(batch[0], batch[1]).square().mean(),
)
add("train mode mix", Training)
add("checkpoints in a row", Checkpoints)
add("autograd.Function and complex numbers", Custom)
add(
    "graph network",
    Graph,
    lambda: (numbers(), torch.randint(0, 7, (2, 20), generator=generator()), labels()),
    lambda model, batch: F.cross_entropy(model(batch[0], batch[1]), batch[2]),
)
add(
    "nn.Transformer",
    Translator,
    lambda: (words(1), words(2)),
    lambda model, batch: F.cross_entropy(model(batch[0], batch[1], pad=0).flatten(0, 1), batch[1].flatten()),
)
add("experts by hand", Experts)
add("things left behind", LeftBehind)
add("gan with one backward", Gan, step=gan_step)
add("parametrizations", Parametrized)
