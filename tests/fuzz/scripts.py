"""The script of a module, made from a base and its pieces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.fuzz.pieces import BLOCKS, CANDIDATES, HOOKS, WIDTH, Base, Piece

OPTIMIZERS = {
    "sgd": "torch.optim.SGD({groups}, lr={lr})",
    "momentum": "torch.optim.SGD({groups}, lr={lr}, momentum=0.9)",
    "adam": "torch.optim.Adam({groups}, lr={lr})",
    "adamw": "torch.optim.AdamW({groups}, lr={lr}, weight_decay=0.1)",
    "rmsprop": "torch.optim.RMSprop({groups}, lr={lr} * 0.1)",
    "adagrad": "torch.optim.Adagrad({groups}, lr={lr})",
    "own": "Own({groups}, lr={lr})",
}


def script(seed: int, base: Base, pieces: Sequence[Piece]) -> str:
    """Return the whole script. `python script.py` trains the module in a pipeline on CPUs, `--plain` in one process."""
    code = Places(pieces)
    for each in pieces:
        base = replace(base, **each.only)
    settings = {
        "schedule": base.schedule,
        "microbatches": None if "forward" in base.schedule_args else base.microbatches,
        "partition": "parameters",
        **({"schedule_args": dict(base.schedule_args)} if base.schedule_args else {}),
        **({"relocation": base.moves} if base.moves else {}),
    }
    for each in pieces:
        settings |= each.strategy
    text = [
        f'"""Module {seed}: {", ".join(each.cause for each in pieces) or "nothing odd"}."""',
        IMPORTS,
        *([SUPERNETS] if base.place == "supernet" else []),
        f"WIDTH = {WIDTH}",
        "",
    ]
    text += [*code.at("top", 0), "", *batches_source(base), "", *block_source(base, code), ""]
    text += [*module_source(base, code), "", *callback_source(code), "", *fit_source(base, pieces, settings)]
    return "\n".join(text) + "\n"


IMPORTS = """
import sys
import tempfile

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
"""

SUPERNETS = "from lightning_pipes.supernets import ChoiceBlock, SearchSpace, SubnetStream, Supernet, Uniform\n"


STREAM = (
    f"    space = SearchSpace.from_sizes([{CANDIDATES}] * {BLOCKS})",
    "    train = SubnetStream(Uniform(space, seed=1)).pair_with(train)",
    "    validation = SubnetStream(Uniform(space, seed=2)).pair_with(validation)",
)
"""Lines that pair batches with subnets."""


class Places:
    """The lines of all pieces, by place."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.lines: dict[str, list[str]] = {}
        for each in pieces:
            for place, lines in each.code.items():
                self.lines.setdefault(place, []).extend(lines)

    def at(self, place: str, indent: int) -> list[str]:
        return [" " * indent + line for line in self.lines.get(place, ())]

    def one(self, place: str, default: str) -> str:
        return self.lines.get(place, [default])[0]


def batches_source(base: Base) -> list[str]:
    """Return the source of the functions `inputs`, `targets`, `collated` and `loader`."""
    if base.batches == "tokens":
        rows = (
            "[(torch.randint(0, 11, (5,), generator=g), torch.randint(0, 3, (5,), generator=g)) for _ in range(rows)]"
        )
    else:
        y = "torch.randn(3, generator=g).double()" if base.loss == "square" else "torch.randint(0, 3, (), generator=g)"
        rows = f"[(torch.randn(WIDTH, generator=g).double(), {y}) for _ in range(rows)]"
    if base.padded:
        labels = "torch.randint(0, 3, (5,), generator=g)"
        labels = f"torch.where(torch.arange(5) < torch.randint(1, 6, (), generator=g), {labels}, -100)"
        rows = f"[(torch.randint(0, 11, (5,), generator=g), {labels}) for _ in range(rows)]"
    elif base.batches == "tokens" and base.loss == "square":
        rows = (
            "[(torch.randint(0, 11, (5,), generator=g), torch.randn(5, 3, generator=g).double()) for _ in range(rows)]"
        )
    part = "[0]" if base.place == "supernet" else ""  # the stream pairs each batch with a subnet
    x, y, collated = {
        "pairs": ("batch[0]", "batch[1]", "x, y"),
        "tokens": ("batch[0]", "batch[1]", "x, y"),
        "dict": ("batch['x']", "batch['y']", "{'x': x, 'y': y, 'name': [str(k) for k in range(len(x))], 'scale': 1.0}"),
        "nested": ("batch[0]['x']", "batch[1][0]", "{'x': x}, [y, torch.arange(len(x))]"),
        "named": ("batch.x", "batch.y", "Pair(x, y)"),
    }[base.batches]
    pair = [
        "from typing import NamedTuple",
        "class Pair(NamedTuple):",
        "    x: torch.Tensor",
        "    y: torch.Tensor",
        "",
    ]
    return [
        *(pair if base.batches == "named" else []),
        "def inputs(batch):",
        f"    return {x.replace('batch', 'batch' + part)}",
        "",
        "def targets(batch):",
        f"    return {y.replace('batch', 'batch' + part)}",
        "",
        "def collated(samples):",
        "    x, y = map(torch.stack, zip(*samples))",
        f"    return {collated}",
        "",
        "def loader(rows, batch_size, seed):",
        "    g = torch.Generator().manual_seed(seed)",
        f"    samples = {rows}",
        "    return DataLoader(samples, batch_size=batch_size, collate_fn=collated)",
        "",
    ]


def block_source(base: Base, code: Places) -> list[str]:
    init, body = {
        "tanh": ([], "torch.tanh(self.linear(h))"),
        "residual": ([], "h + torch.tanh(self.linear(h))"),
        "layer norm": (["self.norm = nn.LayerNorm(WIDTH)"], "h + torch.tanh(self.linear(self.norm(h)))"),
        "group norm": (["self.norm = nn.GroupNorm(2, WIDTH)"], "torch.tanh(self.norm(self.linear(h)))"),
        "weight norm": (
            ["self.more = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))"],
            "torch.tanh(self.more(self.linear(h)))",
        ),
    }[base.block]
    if base.block == "group norm" and base.batches == "tokens":
        body = "torch.tanh(self.norm(self.linear(h).transpose(1, 2)).transpose(1, 2))"
    masked = base.place == "masked"
    return [
        "class Block(nn.Module):",
        "    def __init__(self, n):",
        "        super().__init__()",
        "        self.gain = 0.0",
        "        self.linear = nn.Linear(WIDTH, WIDTH)",
        *[f"        {line}" for line in init],
        *code.at("block_init", 8),
        "",
        f"    def forward(self, h{', mask, scale=1.0' if masked else ''}):",
        *code.at("block_in", 8),
        f"        h = {body}",
        *(["        h = h * mask * scale"] if masked else []),
        *code.at("block_out", 8),
        "        return h",
        "",
    ]


def module_source(base: Base, code: Places) -> list[str]:
    made = f"(Block(n) for n in range({BLOCKS}))"
    layers, call = {
        "sequential": (f"self.layers = nn.Sequential(*{made})", ["h = self.layers(x)"]),
        "several": (f"self.layers = nn.Sequential(*{made})", ["h = self.small(self.layers(x))"]),
        "nested": ("self.net = Net()", ["h = self.net(x)"]),
        "loop": (f"self.layers = nn.ModuleList({made})", ["h = x", "for layer in self.layers:", "    h = layer(h)"]),
        "enumerated": (
            f"self.layers = nn.ModuleList({made})",
            ["h = x", "for n, layer in enumerate(self.layers):", "    h = layer(h)"],
        ),
        "supernet": (
            f"self.layers = Supernet(*(ChoiceBlock([Block(n) for _ in range({CANDIDATES})]) for n in range({BLOCKS})), "
            f"nn.Linear(WIDTH, 3), shared={base.shared!r})",
            ["h = self.layers((x, subnet))"],
        ),
        "headless": (f"self.layers = nn.Sequential(*{made}, nn.Linear(WIDTH, 3))", ["h = self.layers(x)"]),
        "masked": (
            f"self.layers = nn.ModuleList({made})",
            ["h, mask = x, (x > -1).to(x.dtype)", "for layer in self.layers:", "    h = layer(h, mask, scale=0.9)"],
        ),
    }[base.place]
    net = [
        "class Net(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        f"        self.layers = nn.Sequential(*{made})",
        "",
        "    def forward(self, x):",
        "        return self.layers(x)",
        "",
        "",
    ]
    small = ["        self.small = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())"]
    tokens = base.batches == "tokens"
    embeds = ["        self.embed = nn.Embedding(11, WIDTH)", "        self.place = nn.Embedding(5, WIDTH)"]
    flat = "out.flatten(0, -2), y.flatten()"
    loss = {
        "cross entropy": f"F.cross_entropy({flat})",
        "square": "F.mse_loss(out, y)",
        "smooth": f"F.cross_entropy({flat}, label_smoothing=0.1)",
        "weighted": f"(F.cross_entropy({flat}, reduction='none') * (1 + y.flatten())).mean()",
    }[base.loss]
    hooks = []
    for hook, parameters in HOOKS.items():
        if lines := code.at(f"module.{hook}", 8):
            hooks += [
                f"    def {hook}(self{', ' * bool(parameters)}{parameters}):",
                "        module = self",
                *lines,
                "",
            ]
    for place, signature in (
        ("optimizer_step", "optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure)"),
        ("zero_grad", "optimizer_zero_grad(self, epoch, batch_idx, optimizer)"),
        (
            "clipping",
            "configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None)",
        ),
    ):
        if lines := code.at(place, 8):
            hooks += [f"    def {signature}:", "        module = self", *lines, ""]
    optimizer = OPTIMIZERS[base.optimizer].format(groups=code.one("groups", "parameters"), lr="self.lr")
    step = code.lines.get("step_begin", []) + code.lines.get("step_end", [])
    supernet, headless = base.place == "supernet", base.place in ("supernet", "headless")
    out = f"self(inputs(batch){', batch[-1]' * supernet})"
    says = ["    def layers_of_batch(self, batch):", "        return self.layers.layers_of(batch[-1])", ""]
    uses = ["        module = self"] if any("module" in line for line in step) else []
    val_uses = ["        module = self"] if any("module" in line for line in code.lines.get("val_end", [])) else []
    return [
        *(net if base.place == "nested" else []),
        "class Module(pl.LightningModule):",
        "    def __init__(self, lr=0.05):",
        "        super().__init__()",
        "        self.lr = lr",
        *code.at("init", 8),
        f"        {layers}",
        *(small if base.place == "several" else []),
        *(embeds if tokens else []),
        *([] if headless else ["        self.head = nn.Linear(WIDTH, 3)"]),
        *code.at("init_end", 8),
        "",
        *(says if supernet else []),
        f"    def forward(self, x{', subnet' * supernet}):",
        *(["        x = self.embed(x) + self.place(torch.arange(x.size(1)))"] if tokens else []),
        *code.at("before", 8),
        *[f"        {line}" for line in call],
        *code.at("after", 8),
        "        return h" if headless else "        return self.head(h)",
        "",
        "    def training_step(self, batch, batch_idx):",
        *uses,
        *code.at("step_begin", 8),
        f"        out, y = {out}, targets(batch)",
        f"        loss = {loss}",
        *code.at("loss", 8),
        "        self.log('loss', loss, on_step=True, on_epoch=True)",
        *code.at("step_end", 8),
        f"        return {code.one('returned', 'loss')}",
        "",
        "    def validation_step(self, batch, batch_idx):",
        *val_uses,
        f"        out, y = {out}, targets(batch)",
        f"        loss = {loss}",
        "        self.log('val_loss', loss)",
        *code.at("val_end", 8),
        "        return loss",
        "",
        *hooks,
        "    def configure_optimizers(self):",
        *code.at("optimizers", 8),
        "        parameters = list(self.parameters())",
        f"        optimizer = {optimizer}",
        *(
            [f"        return {{'optimizer': optimizer, 'lr_scheduler': {code.one('scheduler', '')}}}"]
            if "scheduler" in code.lines
            else ["        return optimizer"]
        ),
        "",
    ]


def callback_source(code: Places) -> list[str]:
    hooks = []
    for hook, parameters in HOOKS.items():
        if lines := code.at(f"callback.{hook}", 8):
            rest = f", {parameters}" * bool(parameters)
            hooks += [f"    def {hook}(self, trainer, module{rest}):", *lines, ""]
    return ["class Watcher(pl.Callback):", *(hooks or ["    pass", ""])]


def fit_source(base: Base, pieces: Iterable[Piece], settings: Mapping[str, Any]) -> list[str]:
    given = {
        "max_epochs": f"epochs or {base.epochs}",
        "precision": "'64-true'",
        "num_sanity_val_steps": "0",
        "log_every_n_steps": "1",
    }
    for each in pieces:
        given |= each.trainer
    return [
        f"SETTINGS = {settings!r}",
        f"RANKS, RESUMES = {base.ranks}, {base.resumes}",
        "",
        "def make(folder, strategy, devices, callbacks=(), lr=0.05, epochs=None):",
        "    pl.seed_everything(3, verbose=False)",
        "    trainer = pl.Trainer(",
        "        accelerator='cpu',",
        "        devices=devices,",
        "        strategy=strategy,",
        "        default_root_dir=folder,",
        "        logger=CSVLogger(folder, name='', version=0),",
        "        callbacks=[Watcher(), *callbacks],",
        "        enable_checkpointing=False,",
        "        enable_progress_bar=False,",
        "        enable_model_summary=False,",
        *[f"        {name}={text}," for name, text in given.items()],
        "    )",
        "    return trainer, Module(lr).double()",
        "",
        "def data():",
        f"    train, validation = loader({base.rows}, {base.size}, 1), loader(9, 5, 2)",
        *(STREAM if base.place == "supernet" else []),
        "    return {'train_dataloaders': train, 'val_dataloaders': validation}",
        "",
        "if __name__ == '__main__':",
        "    plain = '--plain' in sys.argv",
        "    strategy = 'auto' if plain else PipelineStrategy(**SETTINGS)",
        "    trainer, module = make(tempfile.mkdtemp(), strategy, 1 if plain else RANKS)",
        "    trainer.fit(module, **data())",
        "    if trainer.is_global_zero:",
        "        print({name: float(value) for name, value in trainer.callback_metrics.items()})",
    ]
