"""The models of the zoo written in torch, for comparison with the formulas."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from lightning_pipes.cost.zoo.shapes import LayerShape


class Tokens(nn.Module):
    def __init__(self, vocabulary: int, width: int, context: int, kinds: int = 0, norm: bool = False, p: float = 0.0):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(context, width))
        self.kinds = nn.Embedding(kinds, width) if kinds else None
        self.end = nn.Sequential(*([nn.LayerNorm(width)] if norm else []), nn.Dropout(p))

    def forward(self, x):
        y = self.tokens(x) + self.positions
        if self.kinds is not None:
            y = y + self.kinds(torch.zeros_like(x))
        return self.end(y)


class Block(nn.Module):
    def __init__(self, width, heads, causal, norm_first=True, fused=True, feed_forward=4, p=0.0):
        super().__init__()
        self.heads, self.causal, self.norm_first, self.p = heads, causal, norm_first, p
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        sizes = [3 * width] if fused else [width] * 3
        self.qkv = nn.ModuleList([nn.Linear(width, size) for size in sizes])
        self.proj = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, feed_forward * width), nn.Linear(feed_forward * width, width)

    def attend(self, x):
        n, tokens, width = x.shape
        parts = [p for m in self.qkv for p in m(x).split(width, dim=-1)]
        q, k, v = (p.view(n, tokens, self.heads, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return F.dropout(self.proj(y.transpose(1, 2).reshape(n, tokens, width)), self.p)

    def feed(self, x):
        return F.dropout(self.narrow(F.gelu(self.wide(x))), self.p)

    def forward(self, x):
        for part, norm in zip((self.attend, self.feed), self.norms, strict=True):
            x = x + part(norm(x)) if self.norm_first else norm(x + part(x))
        return x


def vocabulary_head(width, vocabulary, norm=True):
    head = nn.Linear(width, vocabulary, bias=False)
    return nn.Sequential(nn.LayerNorm(width), head) if norm else head


class BertHeads(nn.Module):
    def __init__(self, width, vocabulary):
        super().__init__()
        self.pool, self.follows = nn.Linear(width, width), nn.Linear(width, 2)
        self.hidden, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocabulary)

    def forward(self, x):
        follows = self.follows(torch.tanh(self.pool(x[:, 0])))
        return self.scores(self.norm(F.gelu(self.hidden(x)))), follows


def conv_block(before, channels, norm=False, pool=False):
    parts = [nn.Conv2d(before, channels, 3, padding=1, bias=not norm)]
    parts += [nn.BatchNorm2d(channels)] if norm else []
    return nn.Sequential(*parts, nn.ReLU(), *([nn.MaxPool2d(2)] if pool else []))


def classifier(width, *widths, pooled, p=0.0):
    parts = [nn.AdaptiveAvgPool2d(pooled), nn.Flatten()]
    for out in widths[:-1]:
        parts += [nn.Linear(width, out), nn.ReLU(), nn.Dropout(p)]
        width = out
    return nn.Sequential(*parts, nn.Linear(width, widths[-1]))


def resnet_stem():
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
    )


class Bottleneck(nn.Module):
    def __init__(self, before, channels, stride=1):
        super().__init__()
        sizes = [(before, channels, 1, 1), (channels, channels, 3, stride), (channels, 4 * channels, 1, 1)]
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, k, s, k // 2, bias=False), nn.BatchNorm2d(b)) for a, b, k, s in sizes
        )
        self.short = nn.Identity()
        if stride > 1 or before != 4 * channels:
            self.short = nn.Sequential(
                nn.Conv2d(before, 4 * channels, 1, stride, bias=False), nn.BatchNorm2d(4 * channels)
            )

    def forward(self, x):
        y = F.relu(self.parts[1](F.relu(self.parts[0](x))))
        return F.relu(self.parts[2](y) + self.short(x))


def two_convolutions(before, channels):
    return nn.Sequential(conv_block(before, channels, norm=True), conv_block(channels, channels, norm=True))


class Down(nn.Module):
    def __init__(self, before, channels, pool=True):
        super().__init__()
        self.body, self.pool = two_convolutions(before, channels), pool

    def forward(self, x):
        if not self.pool:
            return self.body(x)
        came = x if isinstance(x, tuple) else (x,)
        return (*came, self.body(F.max_pool2d(came[-1], 2)))


class Up(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.up, self.body = nn.ConvTranspose2d(2 * channels, channels, 2, 2), two_convolutions(2 * channels, channels)

    def forward(self, x):
        *skips, skip, y = x
        z = self.body(torch.cat([skip, self.up(y)], 1))
        return (*skips, z) if skips else z


def vgg(*counts):
    layers, before = [], 3
    for count, channels in zip(counts, (64, 128, 256, 512, 512), strict=True):
        for n in range(count):
            layers.append(conv_block(before, channels, pool=n == count - 1))
            before = channels
    return [*layers, classifier(25088, 4096, 4096, 1000, pooled=7, p=0.5)]


def resnet(*counts):
    layers, before = [resnet_stem()], 64
    for size, count in enumerate(counts):
        for n in range(count):
            layers.append(Bottleneck(before, 64 * 2**size, 2 if size and not n else 1))
            before = 256 * 2**size
    return [*layers, classifier(2048, 1000, pooled=1)]


def unet(channels=(64, 128, 256, 512)):
    return [
        Down(3, channels[0], pool=False),
        *(Down(c, 2 * c) for c in channels),
        *(Up(c) for c in reversed(channels)),
        nn.Conv2d(channels[0], 2, 1),
    ]


def sum_flops(shape: LayerShape) -> tuple[float, float, float]:
    """Return the FLOPs of a layer per sample: forward, gradients of the inputs, gradients of the weights."""
    forward, inputs, weights = (sum(operation.flops[part] for operation in shape.operations) for part in range(3))
    return forward, inputs, weights
