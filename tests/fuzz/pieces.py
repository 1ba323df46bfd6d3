"""Pieces of random modules: code as users write it into LightningModules, in random places.

A piece consists of lines of code for one or more places, options of the Trainer, or settings of the strategy. It has a
cause, by which it can be switched off.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

WIDTH = 6
BLOCKS = 6
CANDIDATES = 3
"""Number of candidates in each block of a supernet."""

OFF: dict[str, str] = {r"^others:.*:one sample": "a branch may depend on one sample of a later batch only"}
"""Causes that are switched off, as regular expressions, with the reasons."""

HOOKS = {
    "setup": "stage",
    "on_fit_start": "",
    "on_train_start": "",
    "on_train_epoch_start": "",
    "on_train_batch_start": "batch, batch_idx",
    "on_before_zero_grad": "optimizer",
    "on_before_backward": "loss",
    "on_after_backward": "",
    "on_before_optimizer_step": "optimizer",
    "on_train_batch_end": "outputs, batch, batch_idx",
    "on_validation_start": "",
    "on_validation_epoch_start": "",
    "on_validation_batch_start": "batch, batch_idx, dataloader_idx=0",
    "on_validation_batch_end": "outputs, batch, batch_idx, dataloader_idx=0",
    "on_validation_epoch_end": "",
    "on_validation_end": "",
    "on_train_epoch_end": "",
    "on_train_end": "",
}
"""Hooks into which pieces write, with their parameters."""

STEPS = ("step_begin", "step_end", "val_end")
"""Places in steps that can write a value, in addition to hooks."""


@dataclass(frozen=True)
class Piece:
    """One feature of a random module.

    Attributes:
        cause: the name of the piece in verdicts and in `OFF`.
        code: lines of code by place. `module.HOOK` and `callback.HOOK` are places, too.
        trainer: options of the Trainer, as source code.
        strategy: settings of PipelineStrategy.
        only: attributes of the base that the piece replaces.
        refused: a regular expression of the error with which a pipeline may refuse the piece; empty if it may not.
        warned: a regular expression of the warning with which a pipeline may train other weights; empty if it may not.
        excludes: kinds of pieces that cannot be combined with this one.
    """

    cause: str
    code: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    trainer: Mapping[str, str] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""
    warned: str = ""
    excludes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return self.cause.split(":")[0]


@dataclass(frozen=True)
class Base:
    """The features that every module has.

    Attributes:
        place: the place of the layers in the module.
        block: the computation of a layer.
        batches: the structure of a batch.
        rows: the number of training samples.
        size: the number of samples in a batch.
        siblings: the number of trainings that share the ranks as a job array, with different learning rates; 0 without
            an array.
        moves: the way in which layers move during training; empty if they do not move.
        padded: whether sequences have labels of -100 at their ends.
        shared: the way in which the subnets of a supernet share its last layer.
    """

    place: str = "sequential"
    block: str = "tanh"
    batches: str = "pairs"
    loss: str = "cross entropy"
    optimizer: str = "sgd"
    rows: int = 22
    size: int = 8
    schedule: str = "1f1b"
    schedule_args: Mapping[str, Any] = field(default_factory=dict)
    microbatches: int = 4
    ranks: int = 2
    epochs: int = 2
    resumes: bool = False
    siblings: int = 0
    moves: str = ""
    padded: bool = False
    shared: str = "per_choice"


def path(base: Base) -> str:
    """Return the path of the layers in the module."""
    return "net.layers" if base.place == "nested" else "layers"


def frozen(code: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    return {place: tuple(lines) for place, lines in code.items()}


def is_off(cause: str) -> bool:
    """Return whether a cause is switched off, see `OFF`."""
    return any(re.search(pattern, cause) for pattern in OFF)


Maker = Callable[[random.Random, Base, int], Piece]
MAKERS: dict[str, tuple[Maker, float]] = {}


def piece(weight: float = 1.0) -> Callable[[Maker], Maker]:
    """Register a function that makes pieces. It is drawn with this weight."""

    def register(maker: Maker) -> Maker:
        MAKERS[maker.__name__.replace("_", " ")] = maker, weight
        return maker

    return register


# ---- values: attributes and buffers that are written in one place and read in others

TRAIN_WRITERS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"),
    *("on_train_epoch_end",),
)
VALIDATION_WRITERS = (
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_validation_epoch_end", "on_validation_end"),
)
LOGGING = {
    **dict.fromkeys(("on_train_batch_start", "on_before_zero_grad", "on_after_backward", "on_train_batch_end"), "both"),
    **dict.fromkeys(("on_before_optimizer_step", "on_before_backward"), "both"),
    **dict.fromkeys(("on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end"), "epoch"),
    **dict.fromkeys(("on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_start"), "epoch"),
}
"""Hooks that may log, either by step and by epoch or by epoch only."""


def source_of_value(rng: random.Random, writer: str) -> tuple[str, str]:
    """Return the name of a random value that is available to the writer, and its source code."""
    found = {
        "epoch": "0.1 * module.current_epoch",
        "step": "0.05 * module.global_step",
        "constant": "0.3",
        "metric": "0.1 * min(1.0, float(module.trainer.callback_metrics.get('loss', 0.0)))",
        "val metric": "0.1 * min(1.0, float(module.trainer.callback_metrics.get('val_loss', 0.0)))",
    }
    if "batch" in HOOKS.get(writer, ""):
        found |= {"index": "0.05 * batch_idx", "batch": "0.1 * float(inputs(batch).double().mean())"}
    if writer == "on_train_batch_end":
        found["outputs"] = "0.1 * min(1.0, float(outputs['loss']))"
    if writer == "on_before_backward":
        found["loss"] = "0.1 * min(1.0, float(loss.detach()))"
    if writer == "step_end":
        found |= {"loss": "0.1 * min(1.0, float(loss.detach()))", "out": "0.1 * float(out.detach().mean().tanh())"}
    if writer == "val_end":
        found |= {"loss": "0.1 * min(1.0, float(loss.detach()))"}
    if writer == "on_before_optimizer_step":
        found["rate"] = "optimizer.param_groups[0]['lr']"
    name = rng.choice(sorted(found))
    return name, found[name]


@piece(6)
def value(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece with a value that is written in one place and read in others."""
    writer = rng.choice((*TRAIN_WRITERS, *VALIDATION_WRITERS, *STEPS))
    owner = "module" if writer in STEPS else rng.choice(("module", "module", "callback"))
    kind = rng.choice(
        ("number", "number", "tensor", "buffer", "buffer in place", "dict", "list", "layer number", "object")
    )
    if writer in STEPS and kind == "layer number":
        kind = "number"
    name, expression = source_of_value(rng, writer)
    at = f"v{n}"
    read = f"self.{at}"
    init = f"self.{at} = 0.1"
    write = f"module.{at} = 0.5 * module.{at} + {expression}"
    match kind:
        case "tensor":
            init = f"self.{at} = torch.tensor(0.1, dtype=torch.float64)"
        case "buffer":
            init = f"self.register_buffer('{at}', torch.tensor(0.1, dtype=torch.float64))"
        case "buffer in place":
            init = f"self.register_buffer('{at}', torch.tensor(0.1, dtype=torch.float64))"
            write = f"module.{at}.mul_(0.5).add_({expression})"
        case "dict":
            init, read = f"self.{at} = {{'now': 0.1}}", f"self.{at}['now']"
            write = f"module.{at}['now'] = 0.5 * module.{at}['now'] + {expression}"
        case "list":
            init, read = f"self.{at} = [0.1]", f"(sum(self.{at}) / len(self.{at}))"
            write = f"module.{at}.append({expression})"
        case "object":
            init, read = f"self.{at} = Thing()", f"self.{at}.now"
            write = f"module.{at}.now = 0.5 * module.{at}.now + {expression}"
        case "layer number":
            init = "pass"
            write = f"[setattr(layer, 'gain', 0.5 * layer.gain + {expression}) for layer in module.{path(base)}]"
    code: dict[str, list[str]] = {"init": [init]}
    if kind == "object":
        code["top"] = ["class Thing:", "    now = 0.1"]
    place = writer if writer in STEPS else f"{owner}.{writer}"
    code.setdefault(place, []).append(write)
    readers = ["layers"] if kind == "layer number" else rng.sample(READERS, rng.choice((1, 1, 2)))
    for reader in readers:
        if reader == "layers":
            code["block_out"] = ["h = h * (1 + self.gain)"]
        else:
            where, lines = reading(rng, reader, read, at)
            code.setdefault(where, []).extend(lines)
    return Piece(f"value:{kind}:{owner}:{writer}:{name}:{'+'.join(sorted(readers))}", frozen(code))


READERS = ("before", "before", "after", "loss", "log", "rate", "validation", "log in a hook")


def reading(rng: random.Random, reader: str, read: str, at: str) -> tuple[str, list[str]]:
    """Return the place at which a value is read, and the lines that read it."""
    of_module = read.replace("self.", "module.")
    match reader:
        case "before":
            return "before", [f"x = x * (1 + {read})"]
        case "after":
            return "after", [f"h = h * (1 + {read})"]
        case "loss":
            return "loss", [f"loss = loss * (1 + {read})"]
        case "log":
            return "step_end", [f"self.log('{at}_log', float({read}))"]
        case "validation":
            return "val_end", [f"self.log('{at}_val', float({read}))"]
        case "rate":
            hook = rng.choice(("on_train_epoch_start", "on_train_batch_start", "on_before_optimizer_step"))
            lines = [
                "for group in module.trainer.optimizers[0].param_groups:",
                f"    group['lr'] = 0.05 * (1 + float({of_module}))",
            ]
            return f"{rng.choice(('module', 'callback'))}.{hook}", lines
    hook = rng.choice(("on_train_batch_end", "on_train_epoch_end", "on_validation_epoch_end"))
    owner = rng.choice(("module", "callback"))
    return f"{owner}.{hook}", [f"module.log('{at}_hook', float({of_module}))"]


@piece(2)
def collected(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece with a list that steps fill and a hook reads."""
    what = rng.choice(("loss", "out", "count"))
    at = f"c{n}"
    step, hook = rng.choice(
        (("step_end", "on_train_epoch_end"), ("step_end", "on_train_batch_end"), ("val_end", "on_validation_epoch_end"))
    )
    value = {"loss": "loss.detach()", "out": "out.detach().mean()", "count": "1.0"}[what]
    merge = rng.choice(("mean", "sum", "last", "number"))
    read = {
        "mean": f"sum(float(v) for v in module.{at}) / max(1, len(module.{at}))",
        "sum": f"sum(float(v) for v in module.{at})",
        "last": f"float(module.{at}[-1]) if module.{at} else 0.0",
        "number": f"float(len(module.{at}))",
    }[merge]
    owner = rng.choice(("module", "callback"))
    use = rng.choice((f"module.log('{at}', {read})", f"module.log('{at}', {read}, on_step=False, on_epoch=True)"))
    clears = [f"module.{at}.clear()"] if rng.random() < 0.7 else []
    code = {"init": [f"self.{at} = []"], step: [f"self.{at}.append({value})"], f"{owner}.{hook}": [use, *clears]}
    return Piece(f"collected:{step}:{what}:{merge}:{owner}:{hook}", frozen(code))


# ---- code around the layers


@piece(3)
def around(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece with code before or after the layers that processes each sample separately."""
    what = rng.choice(
        ("inlet", "inlet norm", "residual", "position", "noise", "outlet", "outlet norm", "scale", "clone")
    )
    code: dict[str, list[str]]
    match what:
        case "inlet":
            code = {"init": [f"self.inlet{n} = nn.Linear(WIDTH, WIDTH)"], "before": [f"x = self.inlet{n}(x)"]}
        case "inlet norm":
            code = {"init": [f"self.inlet{n} = nn.LayerNorm(WIDTH)"], "before": [f"x = self.inlet{n}(x)"]}
        case "residual":
            code = {"before": [f"kept{n} = x"], "after": [f"h = h + 0.5 * kept{n}"]}
        case "position":
            code = {
                "init": [f"self.register_buffer('table{n}', torch.linspace(0, 1, WIDTH, dtype=torch.float64))"],
                "before": [f"x = x + self.table{n}"],
            }
        case "noise":
            code = {"before": ["x = x + 0.1 * torch.sin(1e3 * x.detach())"]}
        case "outlet":
            code = {"init": [f"self.outlet{n} = nn.Linear(WIDTH, WIDTH)"], "after": [f"h = h + self.outlet{n}(h)"]}
        case "outlet norm":
            code = {"init": [f"self.outlet{n} = nn.LayerNorm(WIDTH)"], "after": [f"h = self.outlet{n}(h)"]}
        case "scale":
            code = {"init": [f"self.scale{n} = nn.Parameter(torch.tensor(1.0))"], rng.choice(("before", "after")): []}
            where = next(key for key in code if key != "init")
            code[where] = [f"{'x' if where == 'before' else 'h'} = {'x' if where == 'before' else 'h'} * self.scale{n}"]
        case _:
            code = {"before": ["x = x.clone()", "x[..., 0] = x[..., 0] * 2"]}
    return Piece(f"around:{what}", frozen(code))


@piece(1)
def looks_at_others(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece with code before or after the layers that depends on other samples of the batch."""
    what, line = rng.choice(
        (
            ("mean", "{0} = {0} - {0}.mean(0, keepdim=True)"),
            ("numbered", "{0} = {0} + 0.1 * torch.arange(len({0}), dtype={0}.dtype).view(-1, *[1] * ({0}.ndim - 1))"),
            ("temperature", "{0} = {0} / (1 + {0}.detach().abs().mean())"),
            ("largest", "{0} = {0} / (1 + {0}.detach().abs().max())"),
            ("sorted", "{0} = {0}.sort(0).values"),
            ("count", "{0} = {0} * (1 + 0.1 * len({0}))"),
            ("one sample", "{0} = {0} * 2 if float({0}.detach().flatten()[0]) > 0 else {0}"),
            ("rolled", "{0} = {0} + 0.5 * {0}.roll(1, 0)"),
        )
    )
    where = rng.choice(("before", "after"))
    return Piece(
        f"others:{where}:{what}",
        frozen({where: [line.format("x" if where == "before" else "h")]}),
        warned=r"mean over samples|other samples|samples of (the|a) batch|whole batch|several samples together",
        refused=r"other samples|whole batch",
    )


# ---- hooks of torch


@piece(2)
def torch_hook(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece with a torch hook on a layer, on the container of layers, or on a parameter."""
    what = rng.choice(
        (
            *("forward", "forward pre", "backward scales", "backward clamps", "parameter scales", "parameter clamps"),
            *("container forward", "container backward", "collects", "counts"),
        )
    )
    block = f"module.{path(base)}[{rng.randrange(BLOCKS)}]"
    container = f"module.{path(base)}"
    lines = {
        "forward": [f"{block}.register_forward_hook(lambda layer, x, y: y * 1.1)"],
        "forward pre": [f"{block}.register_forward_pre_hook(lambda layer, x: (x[0] * 1.1, *x[1:]))"],
        "backward scales": [f"{block}.register_full_backward_hook(lambda layer, into, out: scaled(into))"],
        "backward clamps": [f"{block}.register_full_backward_hook(lambda layer, into, out: clamped(into))"],
        "parameter scales": [f"{block}.linear.weight.requires_grad_().register_hook(lambda g: g * 0.5)"],
        "parameter clamps": [f"{block}.linear.weight.requires_grad_().register_hook(lambda g: g.clamp(-1e-3, 1e-3))"],
        "container forward": [f"{container}.register_forward_hook(lambda layers, x, y: y * 1.1)"],
        "container backward": [f"{container}.register_full_backward_hook(lambda layers, into, out: scaled(into))"],
        "collects": [f"{block}.register_forward_hook(lambda layer, x, y: module.seen{n}.append(y.detach().mean()))"],
        "counts": [
            f"{block}.register_forward_hook(lambda layer, x, y: setattr(module, 'seen{n}', module.seen{n} + 1))"
        ],
    }[what]
    place = rng.choice(("init_end", "module.on_fit_start", "module.on_train_start", "callback.on_train_start"))
    if rng.random() < 0.15:
        place = "module.on_train_epoch_end"
        lines = ["if module.current_epoch == 0:", *[f"    {line}" for line in lines]]
    code: dict[str, list[str]] = {place: lines}
    if "backward" in what:
        code["top"] = [
            "def scaled(gradients):",
            "    return tuple(None if g is None else g * 0.5 for g in gradients)",
            "",
            "def clamped(gradients):",
            "    return tuple(None if g is None else g.clamp(-1e-3, 1e-3) for g in gradients)",
            "",
        ]
    if what == "collects":
        code |= {
            "init": [f"self.seen{n} = []"],
            "module.on_train_epoch_end": [f"module.log('seen{n}', sum(map(float, self.seen{n})) / len(self.seen{n}))"],
        }
    if what == "counts":
        code |= {
            "init": [f"self.seen{n} = 0"],
            "module.on_train_epoch_end": [f"module.log('seen{n}', float(self.seen{n}))"],
        }
    if place == "init_end":
        code[place] = ["module = self", *lines]
    refused = {
        "container forward": "has forward hooks, which no rank could run",
        "container backward": "registers a backward hook on self|has backward hooks, which no rank could run",
    }.get(what, "")
    return Piece(f"torch hook:{what}:{place}", frozen(code), refused=refused)


# ---- freezing and modes


@piece(2)
def freezes(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece that freezes and unfreezes layers at different times."""
    blocks = sorted(rng.sample(range(BLOCKS), rng.choice((1, 2, 3))))
    place = rng.choice(
        (
            *("init_end", "module.on_fit_start", "module.on_train_epoch_start", "module.on_train_batch_start"),
            *("callback.on_train_epoch_start", "callback.on_train_batch_start", "module.on_train_epoch_end"),
            *("callback.on_train_epoch_end", "module.on_validation_epoch_end", "module.on_train_batch_end"),
            "optimizers",
        )
    )
    when = "False"
    if "batch" in place:
        when = rng.choice(("batch_idx % 2 == 0", "module.global_step > 1"))
    elif "epoch" in place:
        when = rng.choice(("module.current_epoch > 0", "module.current_epoch == 0"))
    whose = rng.choice(("layers", "layers", "head", "embedding" if base.batches == "tokens" else "head"))
    lines = [f"for n in {blocks}:", f"    module.{path(base)}[n].requires_grad_({when})"]
    if whose == "head":
        lines = [f"module.head.requires_grad_({when})"]
    elif whose == "embedding":
        lines = [f"module.embed.requires_grad_({when})"]
    if place in ("init_end", "optimizers"):
        lines = ["module = self", *lines]
    return Piece(f"freezes:{place}:{whose}:{when}", frozen({place: lines}))


@piece(2)
def modes(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece that sets layers with dropout or batch normalization to eval mode."""
    part, own = rng.choice((("nn.BatchNorm1d(WIDTH)", "norm"), ("nn.Dropout(0.5)", "drop")))
    blocks = sorted(rng.sample(range(BLOCKS), rng.choice((1, 2))))
    place = rng.choice(
        (
            "init_end",
            "module.on_fit_start",
            "module.on_train_epoch_start",
            "module.on_train_start",
            "callback.on_train_epoch_start",
        )
    )
    lines = [f"for n in {blocks}:", f"    module.{path(base)}[n].extra{n}.eval()"]
    if place == "init_end":
        lines = ["module = self", *lines]
    inits = [f"self.extra{n} = {part} if n in {blocks} else nn.Identity()"]
    code = {"block_init": inits, "block_out": [apply_norm(base, f"self.extra{n}", own)], place: lines}
    return Piece(f"modes:{own}:{place}", frozen(code))


def apply_norm(base: Base, norm: str, own: str = "norm") -> str:
    """Return a line that applies a norm, or another layer, to the output of a block."""
    if base.batches == "tokens" and own == "norm":
        return f"h = {norm}(h.transpose(1, 2)).transpose(1, 2)"
    return f"h = {norm}(h)"


@piece(0.7)
def batch_norm(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece with BatchNorm in or around the layers, over whole batches."""
    where = rng.choice(("layers", "before", "after"))
    if where == "layers":
        code = {
            "block_init": [f"self.norm{n} = nn.BatchNorm1d(WIDTH)"],
            "block_out": [apply_norm(base, f"self.norm{n}")],
        }
    else:
        name = "x" if where == "before" else "h"
        line = apply_norm(base, f"self.norm{n}").replace("(h", f"({name}").replace("h =", f"{name} =")
        code = {"init": [f"self.norm{n} = nn.BatchNorm1d(WIDTH)"], where: [line]}
    return Piece(f"batch norm:{where}", frozen(code), strategy={"microbatches": 1}, only={"rows": 22})


# ---- layers that share or store values


@piece(1)
def tied(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece in which two layers share a weight, a bias or a module."""
    a, b = sorted(rng.sample(range(BLOCKS), 2))
    what, lines = rng.choice(
        (
            ("weight", [f"self.{path(base)}[{b}].linear.weight = self.{path(base)}[{a}].linear.weight"]),
            ("module", [f"self.{path(base)}[{b}].linear = self.{path(base)}[{a}].linear"]),
            ("bias", [f"self.{path(base)}[{b}].linear.bias = self.{path(base)}[{a}].linear.bias"]),
        )
    )
    return Piece(f"tied:{what}", frozen({"init_end": lines}))


@piece(1)
def auxiliary(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece in which layers store auxiliary losses, which the step adds to its loss."""
    how = rng.choice(("attribute", "list", "buffer"))
    loss = "1e-2 * h.pow(2).mean()"
    match how:
        case "attribute":
            code = {
                "block_init": [f"self.aux{n} = 0.0"],
                "block_out": [f"self.aux{n} = {loss}"],
                "loss": [f"loss = loss + sum(layer.aux{n} for layer in self.{path(base)})"],
            }
        case "list":
            code = {
                "block_init": [f"self.aux{n} = []"],
                "block_out": [f"self.aux{n}.append({loss})"],
                "loss": [
                    f"loss = loss + sum(layer.aux{n}[-1] for layer in self.{path(base)})",
                    f"[layer.aux{n}.clear() for layer in self.{path(base)}]",
                ],
            }
        case _:
            code = {
                "block_init": [
                    f"self.register_buffer('aux{n}', torch.zeros((), dtype=torch.float64), persistent=False)"
                ],
                "block_out": [f"self.aux{n} = h.detach().pow(2).mean()"],
                "loss": [f"loss = loss * (1 + sum(layer.aux{n} for layer in self.{path(base)}))"],
            }
    return Piece(f"auxiliary:{how}", frozen(code), warned=r"mean over samples")


@piece(1)
def buffers_of_layers(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece in which each layer keeps a running mean of its outputs and adds it to them."""
    step = (
        f"self.run{n}.mul_(0.9).add_(0.1 * h.detach().mean())"
        if rng.random() < 0.5
        else (f"self.run{n} = 0.9 * self.run{n} + 0.1 * h.detach().mean()")
    )
    code = {
        "block_init": [f"self.register_buffer('run{n}', torch.zeros((), dtype=torch.float64))"],
        "block_out": ["if self.training:", f"    {step}", f"h = h + self.run{n}"],
    }
    return Piece("buffers of layers:running", frozen(code), strategy={"microbatches": 1})


@piece(0.6)
def regular(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece that adds a penalty on weights to the loss: on the head, the layers, or all weights."""
    whose = rng.choice(("head", "layers", "all"))
    parameters = {
        "head": "self.head.parameters()",
        "layers": f"self.{path(base)}.parameters()",
        "all": "self.parameters()",
    }[whose]
    lines = [f"loss = loss + 1e-3 * sum(p.pow(2).sum() for p in {parameters})"]
    refused = "" if whose == "head" else r"weights of layers that live on another rank|."
    return Piece(f"regular:{whose}", frozen({"loss": lines}), refused=refused)


# ---- logs


@piece(3)
def logs(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece with a log call with random flags in a random place."""
    place = rng.choice(
        (
            "step_begin",
            "step_end",
            "step_end",
            "val_end",
            *(f"{o}.{h}" for h in LOGGING for o in ("module", "callback")),
        )
    )
    hook = place.split(".")[-1]
    values = {"constant": "0.5", "epoch": "float(module.current_epoch)"}
    if place == "step_begin":
        values |= {"input": "inputs(batch).double().mean()", "index": "float(batch_idx)"}
    if place in ("step_end", "val_end"):
        values |= {
            "loss": "loss",
            "out": "out.detach().double().mean()",
            "largest": "out.detach().max()",
            "rows": "float(len(out))",
        }
    if hook == "on_train_batch_end":
        values["outputs"] = "outputs['loss']"
    if hook == "on_before_backward":
        values["loss"] = "loss"
    if hook == "on_before_optimizer_step":
        values |= {"rate": "optimizer.param_groups[0]['lr']"}
    what = rng.choice(sorted(values))
    flags: dict[str, str] = {}
    if LOGGING.get(hook) != "epoch" and place != "val_end":
        step, epoch = rng.choice((("True", "False"), ("False", "True"), ("True", "True")))
        flags |= {"on_step": step, "on_epoch": epoch}
    elif place == "val_end" and rng.random() < 0.3:
        flags |= {"on_step": "True", "on_epoch": "True"}
    reduce = "mean"
    if what == "largest":
        reduce = "max"
    elif rng.random() < 0.3:
        reduce = rng.choice(("max", "min", "sum"))
    if place in ("step_begin", "step_end") and what in ("loss", "out", "input") and reduce in ("max", "min"):
        reduce = "mean"
    if reduce != "mean":
        flags["reduce_fx"] = repr(reduce)
    for flag in ("sync_dist", "prog_bar"):
        if rng.random() < 0.3:
            flags[flag] = "True"
    if rng.random() < 0.4 and (place in STEPS or "batch" in HOOKS.get(hook, "")):
        flags["batch_size"] = "len(inputs(batch))"
    given = "".join(f", {flag}={text}" for flag, text in flags.items())
    line = f"module.log('log{n}', {values[what]}{given})"
    return Piece(f"logs:{place}:{what}:{reduce}", frozen({place: [line]}))


# ---- gradients and optimizers


@piece(2)
def gradients(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece with a hook that changes gradients."""
    place = rng.choice(
        (
            *("module.on_before_optimizer_step", "callback.on_before_optimizer_step", "module.on_after_backward"),
            *("callback.on_after_backward", "clipping"),
        )
    )
    what = rng.choice(("norm", "norm", "value", "scale", "sign", "norm by hand", "of groups", "not finite", "none"))
    params = rng.choice(("module.parameters()", "[p for p in module.parameters() if p.requires_grad]"))
    each = ["for p in module.parameters():", "    if p.grad is not None:"]
    groups = "[p for group in module.trainer.optimizers[0].param_groups for p in group['params']]"
    lines = {
        "norm": [f"torch.nn.utils.clip_grad_norm_({params}, 0.1)"],
        "value": [f"torch.nn.utils.clip_grad_value_({params}, 0.01)"],
        "scale": [*each, "        p.grad.mul_(0.7)"],
        "sign": [*each, "        p.grad = p.grad.sign() * 0.01"],
        "norm by hand": [
            "total = sum(float(p.grad.pow(2).sum()) for p in module.parameters() if p.grad is not None) ** 0.5",
            *each,
            "        p.grad.div_(1 + total)",
        ],
        "of groups": [f"torch.nn.utils.clip_grad_norm_({groups}, 0.1)"],
        "not finite": [*each, "        torch.nan_to_num_(p.grad)"],
        "none": ["for name, p in module.named_parameters():", "    if name.endswith('bias'):", "        p.grad = None"],
    }[what]
    refused = r"." if what == "norm by hand" else ""
    return Piece(
        f"gradients:{place}:{what}",
        frozen({place: lines}),
        refused=refused,
        excludes=("clips",) if place == "clipping" else (),
    )


@piece(1.5)
def step_overridden(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece that overrides `optimizer_step`."""
    what, lines = rng.choice(
        (
            ("plain", ["optimizer.step(closure=optimizer_closure)"]),
            ("super", ["super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)"]),
            (
                "warm up",
                [
                    "for group in optimizer.param_groups:",
                    "    group['lr'] = 0.05 * min(1.0, (module.global_step + 1) / 3)",
                    "optimizer.step(closure=optimizer_closure)",
                ],
            ),
            (
                "skips",
                [
                    "if batch_idx % 2 == 0:",
                    "    optimizer.step(closure=optimizer_closure)",
                    "else:",
                    "    optimizer_closure()",
                ],
            ),
            ("closure first", ["optimizer_closure()", "optimizer.step()"]),
            (
                "clips",
                ["optimizer_closure()", "torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)", "optimizer.step()"],
            ),
            (
                "clips groups",
                [
                    "optimizer_closure()",
                    "torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g['params']], 0.1)",
                    "optimizer.step()",
                ],
            ),
            (
                "norm by hand",
                [
                    "optimizer_closure()",
                    "total = sum(float(p.grad.pow(2).sum()) for p in module.parameters() if p.grad is not None) ** 0.5",
                    "[p.grad.div_(1 + total) for p in module.parameters() if p.grad is not None]",
                    "optimizer.step()",
                ],
            ),
            (
                "clamps",
                ["optimizer.step(closure=optimizer_closure)", "[p.data.clamp_(-1, 1) for p in module.parameters()]"],
            ),
            ("twice", ["optimizer.step(closure=optimizer_closure)", "optimizer.step()"]),
            ("two closures", ["optimizer_closure()", "optimizer_closure()", "optimizer.step()"]),
        )
    )
    refused = {"norm by hand": ".", "two closures": "."}.get(what, "")
    return Piece(
        f"optimizer_step:{what}", frozen({"optimizer_step": lines}), refused=refused, excludes=("clips", "accumulates")
    )


@piece(0.5)
def zero_grad(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece that overrides `optimizer_zero_grad`."""
    line = rng.choice(("optimizer.zero_grad(set_to_none=False)", "optimizer.zero_grad()", "module.zero_grad()"))
    return Piece(f"zero_grad:{line}", frozen({"zero_grad": [line]}))


@piece(1)
def odd_optimizer(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece with an optimizer that reads all weights, or calls its closure twice."""
    what = rng.choice(("norm inside", "trust ratio", "two closures", "sam", "centred"))
    head = ["class Own(torch.optim.SGD):", "    def step(self, closure=None):"]
    every = "[p for group in self.param_groups for p in group['params'] if p.grad is not None]"
    body = {
        "norm inside": [
            "loss = None if closure is None else closure()",
            f"torch.nn.utils.clip_grad_norm_({every}, 0.1)",
            "super().step()",
            "return loss",
        ],
        "trust ratio": [
            "loss = None if closure is None else closure()",
            f"for p in {every}:",
            "    p.grad.mul_(min(1.0, float(p.detach().norm() / (p.grad.norm() + 1e-3))))",
            "super().step()",
            "return loss",
        ],
        "two closures": ["loss = closure()", "closure()", "super().step()", "return loss"],
        "sam": [
            "loss = closure()",
            f"norm = sum(float(p.grad.pow(2).sum()) for p in {every}) ** 0.5 + 1e-9",
            f"moved = [(p, p.grad * (0.05 / norm)) for p in {every}]",
            "with torch.no_grad():",
            "    for p, by in moved:",
            "        p.add_(by)",
            "closure()",
            "with torch.no_grad():",
            "    for p, by in moved:",
            "        p.sub_(by)",
            "super().step()",
            "return loss",
        ],
        "centred": [
            "loss = None if closure is None else closure()",
            f"mean = sum(float(p.grad.mean()) for p in {every})",
            f"for p in {every}:",
            "    p.grad.sub_(0.1 * mean)",
            "super().step()",
            "return loss",
        ],
    }[what]
    code = {"top": [*head, *[f"        {line}" for line in body]]}
    refused = "" if what == "trust ratio" else "."
    return Piece(
        f"odd optimizer:{what}",
        frozen(code),
        only={"optimizer": "own"},
        refused=refused,
        warned="" if what == "trust ratio" else "optimizer",
        excludes=("clips", "accumulates", "optimizer_step", "groups"),
    )


@piece(2)
def groups(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece with parameter groups that have different learning rates or weight decays."""
    what, groups = rng.choice(
        (
            ("two", "[{'params': parameters[::2]}, {'params': parameters[1::2], 'lr': 0.01}]"),
            (
                "decay",
                "[{'params': [p for p in parameters if p.ndim > 1], 'weight_decay': 0.1}, "
                "{'params': [p for p in parameters if p.ndim < 2]}]",
            ),
            (
                "layers",
                "[{'params': [*self.head.parameters()], 'lr': 0.02}, "
                "{'params': [p for n, p in self.named_parameters() if not n.startswith('head.')]}]",
            ),
            ("each", "[{'params': [p], 'lr': 0.01 * (1 + k % 3)} for k, p in enumerate(parameters)]"),
            ("trained", "[p for p in parameters if p.requires_grad]"),
            ("layers only", f"[*self.{path(base)}.parameters()]"),
        )
    )
    return Piece(f"groups:{what}", frozen({"groups": [groups]}))


@piece(2)
def schedules_rate(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece with a learning rate scheduler."""
    what = rng.choice(
        ("step", "epoch", "lambda", "cosine", "one cycle", "plateau", "plateau each step", "two", "warm up")
    )
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "step": ("lr_scheduler.StepLR(optimizer, 2, 0.5)", {"interval": "step"}),
        "epoch": ("lr_scheduler.StepLR(optimizer, 1, 0.5)", {}),
        "lambda": (
            "lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))",
            {"interval": rng.choice(("step", "epoch"))},
        ),
        "cosine": ("lr_scheduler.CosineAnnealingLR(optimizer, 5)", {"interval": "step", "frequency": 2}),
        "one cycle": (
            "lr_scheduler.OneCycleLR(optimizer, 0.1, cycle_momentum=False, "
            "total_steps=int(self.trainer.estimated_stepping_batches) * 3 + 9)",
            {"interval": "step"},
        ),
        "plateau": (
            "lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)",
            {"monitor": rng.choice(("val_loss", "loss_epoch"))},
        ),
        "plateau each step": (
            "lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)",
            {"monitor": "loss", "interval": "step"},
        ),
        "two": (
            "lr_scheduler.ChainedScheduler("
            "[lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.StepLR(optimizer, 1)])",
            {},
        ),
        "warm up": (
            "lr_scheduler.SequentialLR(optimizer, "
            "[lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2])",
            {"interval": "step"},
        ),
    }
    scheduler, more = kinds[what]
    monitor = more.get("monitor", "")
    return Piece(f"rate:{what}:{monitor}", frozen({"scheduler": [f"{{'scheduler': {scheduler}, **{more!r}}}"]}))


@piece(1.5)
def weights(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece with a hook that changes weights."""
    place = rng.choice(
        (
            *("module.on_train_batch_end", "callback.on_train_batch_end", "module.on_train_epoch_start"),
            *("module.on_train_batch_start", "callback.on_train_epoch_end", "module.on_train_epoch_end"),
            *("module.on_train_start", "callback.on_validation_end", "module.on_validation_epoch_end"),
        )
    )
    block = f"module.{path(base)}[{rng.randrange(BLOCKS)}]"
    what, lines = rng.choice(
        (
            ("clamp", ["for p in module.parameters():", "    p.clamp_(-0.3, 0.3)"]),
            ("decay", ["for name, p in module.named_parameters():", "    if p.ndim > 1:", "        p.mul_(0.99)"]),
            ("data", ["for p in module.parameters():", "    p.data = p.data * 0.99"]),
            ("one layer", [f"{block}.linear.weight.mul_(0.9)"]),
            ("init", [f"nn.init.constant_({block}.linear.bias, 0.1)"]),
            ("zeros", [f"nn.init.zeros_({block}.linear.bias)"]),
            ("head", ["module.head.weight.mul_(0.9)"]),
            ("fill", [f"{block}.linear.bias.fill_(0.05)"]),
            ("copy", [f"{block}.linear.bias.copy_(torch.linspace(0, 0.1, WIDTH, dtype=torch.float64))"]),
            ("random", [f"nn.init.normal_({block}.linear.bias, std=0.1)"]),
            ("reset", [f"{block}.linear.reset_parameters()"]),
            (
                "row norm",
                [
                    "for p in module.parameters():",
                    "    if p.ndim > 1:",
                    "        p.div_(p.norm(dim=1, keepdim=True).clamp(min=1.0))",
                ],
            ),
        )
    )
    lines = ["with torch.no_grad():", *[f"    {line}" for line in lines]]
    on_last = place in ("module.on_train_epoch_end", "module.on_validation_epoch_end")
    refused = "." if what in ("random", "reset") or on_last else ""
    return Piece(
        f"weights:{place}:{what}",
        frozen({place: lines}),
        refused=refused,
        warned="random" if what in ("random", "reset") else "",
        only={"resumes": False} if what in ("random", "reset") else {},  # a resumed pipeline restores its random state
    )


@piece(0.7)
def average(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece that averages weights over batches, and copies the averages into the weights at the end."""
    code = {
        "init": [f"self.mean{n} = {{}}"],
        "module.on_train_batch_end": [
            "with torch.no_grad():",
            "    for name, p in self.named_parameters():",
            f"        self.mean{n}[name] = 0.5 * self.mean{n}.get(name, p.detach().clone()) + 0.5 * p.detach()",
        ],
        "module.on_train_end": [
            "with torch.no_grad():",
            "    for name, p in self.named_parameters():",
            f"        p.copy_(self.mean{n}[name])",
        ],
    }
    return Piece("average:in a dict", frozen(code))


# ---- the Trainer, the step and the strategy


@piece(3)
def options(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece with an option of the Trainer."""
    name, given = rng.choice(
        (
            ("clips", {"gradient_clip_val": "0.05"}),
            ("clips", {"gradient_clip_val": "0.01", "gradient_clip_algorithm": "'value'"}),
            ("accumulates", {"accumulate_grad_batches": "2"}),
            ("accumulates", {"accumulate_grad_batches": "3"}),
            ("val interval", {"val_check_interval": rng.choice(("1", "2", "0.5"))}),
            ("val interval", {"check_val_every_n_epoch": "2"}),
            ("steps", {"max_steps": rng.choice(("3", "5"))}),
            ("limits", {"limit_train_batches": "2"}),
            ("limits", {"limit_val_batches": rng.choice(("1", "0"))}),
            ("sanity", {"num_sanity_val_steps": "2"}),
            ("log every", {"log_every_n_steps": "2"}),
            ("anomaly", {"detect_anomaly": "True"}),
        )
    )
    # If a run with max_steps resumes from the end of an epoch, Lightning itself trains nothing, but a pipeline does.
    return Piece(f"{name}:{given}", trainer=given, only={"resumes": False} if name == "steps" else {})


@piece(1)
def returned(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece that sets the return value of the step, or ends an epoch early."""
    what, code = rng.choice(
        (
            ("dict", {"returned": ["{'loss': loss, 'out': out.detach()}"]}),
            ("dict of more", {"returned": ["{'loss': loss, 'twice': loss.detach() * 2, 'rows': len(out)}"]}),
            ("loss only in dict", {"returned": ["{'loss': loss}"]}),
            ("stops the epoch", {"module.on_train_batch_start": ["if batch_idx == 2:", "    return -1"]}),
            ("zero times", {"loss": ["loss = loss * 0 if batch_idx == 1 else loss"]}),
        )
    )
    return Piece(f"returned:{what}", frozen(code))


@piece(0.7)
def metric(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece with a torchmetrics object in the training step."""
    code = {
        "top": [
            "class Mean(torchmetrics.Metric):",
            "    full_state_update = False",
            "",
            "    def __init__(self):",
            "        super().__init__()",
            "        for name in ('total', 'rows'):",
            "            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx='sum')",
            "",
            "    def update(self, values):",
            "        self.total, self.rows = self.total + values.double().sum(), self.rows + values.numel()",
            "",
            "    def compute(self):",
            "        return self.total / self.rows",
            "",
        ],
        "init": [f"self.metric{n} = Mean()"],
        "step_end": [
            f"self.metric{n}(out.detach())",
            f"self.log('metric{n}', self.metric{n}, on_step={rng.random() < 0.5}, on_epoch=True)",
        ],
    }
    return Piece("metric:mean", frozen(code))


ALIKE = ("1f1b", "gpipe", "kfkb", "deep", "per_link")
"""Schedules that can replace each other in the middle of a run."""


@piece(1)
def changes(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece that changes the schedule, or the layers of the stages, during training."""
    at = rng.randrange(1, 5)
    lines = [f"if trainer.global_step == {at} and hasattr(trainer.strategy, 'adopt'):"]
    top: tuple[str, ...] = ()
    if rng.random() < 0.5 and base.schedule in ALIKE:
        what = rng.choice([name for name in ALIKE if name != base.schedule])
        lines += [f"    trainer.strategy.adopt({what!r}, microbatches={rng.choice((1, 2, 3))})"]
        what = f"schedule {what}"
    elif base.schedule in ALIKE and base.ranks == 2:
        what, to = "layers", rng.randrange(1, BLOCKS)
        top = ("from dataclasses import replace", "", "from lightning_pipes.ir import Span", "")
        lines += [
            "    plan = trainer.strategy.current_run.engine.plan",
            f"    plan = replace(plan, layers=(Span(0, {to}), Span({to}, {BLOCKS})))",
            "    trainer.strategy.adopt(trainer.strategy.schedule, plan=plan)",
        ]
    else:
        what, lines = "nothing", ["pass"]
    only = {"siblings": 0} | ({"microbatches": max(2, base.microbatches)} if what == "layers" else {})
    return Piece(f"changes:{what}", frozen({"top": top, "callback.on_train_batch_end": lines}), only=only)


@piece(1)
def placement(rng: random.Random, base: Base, n: int) -> Piece:
    """Return a piece with a setting of the strategy."""
    what, given = rng.choice(
        (
            ("recompute", {"recompute": True}),
            ("partition", {"partition": "auto"}),
            ("checkpoint", {"checkpoint": "sharded"}),
            ("seed", {"seed": 5}),
        )
    )
    return Piece(f"placement:{what}", strategy=given)
