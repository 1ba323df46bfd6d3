"""Tests of random numbers in a pipeline against one process with the same rules for random streams."""

from __future__ import annotations

import hashlib
import random
from tempfile import mkdtemp
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import Case, Lit, data, differences, plain_values, train_cases
from tests.trainers import make_trainer

SEED = 5
MICROBATCHES = 3


class LitRandom(Lit):
    """A module with random numbers from three generators.

    It has noise on its input, dropout in and after the layers, and randomly mixed targets.
    """

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return random_loss(self.model, *batch)


def random_loss(layers: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    share = random.random()
    order = np.random.permutation(len(x))
    x = share * x + (1 - share) * x[order] + 0.1 * torch.randn_like(x)
    logits = layers(x)
    kept = F.dropout(logits, 0.3) * random.random() * np.random.rand()
    return share * F.cross_entropy(kept, y) + (1 - share) * F.cross_entropy(logits, y[order])


def seed_stream(layer: int, number: int, start: int, stop: int, everything: bool = False) -> None:
    """Seed torch, and Python and NumPy if `everything` is set, for a layer and the samples of a micro-batch."""
    text = f"{SEED}/0/{layer}/{number}/{start}:{stop}".encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
    torch.manual_seed(seed)
    if everything:
        random.seed(seed)
        np.random.seed(seed % 2**32)


def follow_the_rule(dropout: float) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return the losses and weights of two epochs on one process with explicitly seeded random streams.

    Code before the layers uses stream -1, each layer uses a stream of its own, and code after the layers uses stream
    -2. Only stream -1 also seeds Python and NumPy, whose generators are not seeded again within the micro-batch.
    """
    pl.seed_everything(3, verbose=False)
    module = LitRandom(dropout=dropout).double()
    optimizer = module.configure_optimizers()["optimizer"]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    x, y = data().tensors
    losses = []
    for number, first in enumerate([*range(0, len(x), 8), *range(0, len(x), 8)]):
        rows = min(8, len(x) - first)
        losses.append(0.0)
        optimizer.zero_grad()
        for m in range(MICROBATCHES):
            start, stop = m * rows // MICROBATCHES, (m + 1) * rows // MICROBATCHES

            def layers(h: torch.Tensor, number: int = number, start: int = start, stop: int = stop) -> torch.Tensor:
                for n, layer in enumerate(module.model):
                    seed_stream(n, number, start, stop)
                    h = layer(h)
                seed_stream(-2, number, start, stop)
                return h

            part = slice(first + start, first + stop)
            seed_stream(-1, number, start, stop, everything=True)
            loss = random_loss(layers, x[part], y[part]) * (stop - start) / rows
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        scheduler.step()
    return losses, plain_values(dict(module.state_dict()))


CASES = [
    Case(LitRandom, {"dropout": 0.4}, {"microbatches": MICROBATCHES, "seed": SEED, **settings}, {"max_epochs": 2})
    for settings in ({"schedule": "1f1b"}, {"schedule": "interleaved"}, {"schedule": "gpipe", "recompute": True})
]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_random_numbers_do_not_depend_on_the_stages(ranks):
    """Losses and weights on one, two and four ranks equal the run with explicitly seeded streams."""
    losses, weights = follow_the_rule(0.4)
    for of_rank in run_ranks(train_cases, ranks, CASES, ranks, mkdtemp(), timeout=60):
        for found in of_rank:
            assert differences([o["loss"] for o in found["outputs"]], losses) == []
            assert differences(found["weights"], weights) == []


def test_random_numbers_after_a_resume(tmp_path):
    """One epoch on four ranks followed by one on two ranks equals two epochs on two ranks.

    This would fail if random numbers came from global generators, whose states would differ after the resume.
    """
    strategy = {"microbatches": MICROBATCHES, "seed": SEED}
    path = str(tmp_path / "half.ckpt")
    whole = Case(LitRandom, {"dropout": 0.4}, strategy, {"max_epochs": 2})
    first = Case(LitRandom, {"dropout": 0.4}, strategy, save=path)
    second = Case(LitRandom, {"dropout": 0.4}, strategy, {"max_epochs": 2}, resume=path)
    run_ranks(train_cases, 4, [first], 4, str(tmp_path / "first"), timeout=60)
    expected, found = run_ranks(train_cases, 2, [whole, second], 2, str(tmp_path / "second"), timeout=60)[0]
    assert differences(found["outputs"], expected["outputs"][3:]) == []
    assert differences(found["weights"], expected["weights"]) == []


class LitStirring(Lit):
    """A module with a hook that draws random numbers."""

    def on_train_epoch_end(self) -> None:
        torch.rand(3)


def shuffled(rank: int, ranks: int) -> list[list[float]]:
    """Return the first feature of each sample in the batches of three epochs, as this rank sees them."""
    from lightning.pytorch.callbacks import Callback
    from torch.utils.data import DataLoader

    from lightning_pipes import PipelineStrategy
    from tests.trainer.lit import quiet

    seen: list[list[float]] = []

    class See(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(batch[0][:, 0].tolist())

    quiet()
    torch.manual_seed(11 * (ranks == 1 or rank == 0) + rank)  # as if the ranks had been seeded differently
    trainer = make_trainer(
        devices=ranks,
        strategy="auto" if ranks == 1 else PipelineStrategy(microbatches=2),
        max_epochs=3,
        precision="64-true",
        callbacks=[See()],
    )
    module = (Lit if ranks == 1 else LitStirring)(layers=3)
    trainer.fit(module, DataLoader(data(), batch_size=8, shuffle=True))
    return seen


def test_ranks_shuffle_alike_and_as_one_process():
    """Both ranks get the same batches. The first epoch equals one process, and each later epoch has a new order."""
    plain = run_ranks(shuffled, 1, 1)[0]
    first, second = run_ranks(shuffled, 2, 2)
    assert first == second
    assert first[:3] == plain[:3]  # later epochs differ because the hook draws numbers
    assert first[3:6] != first[:3]


class Own:
    """One generator of each of four kinds."""

    def __init__(self) -> None:
        self.generators = (
            np.random.default_rng(1),
            np.random.RandomState(2),
            random.Random(3),
            torch.Generator().manual_seed(4),
        )

    def draw(self) -> tuple[float, ...]:
        """Return one number of each generator."""
        numpy, old, python, of_torch = self.generators
        return (
            numpy.random(),
            old.rand(),
            python.random(),
            float(torch.rand((), dtype=torch.float64, generator=of_torch)),
        )


class LitOwn(Lit):
    """A module with generators of its own.

    It draws numbers before and after the layers, and records them in a class attribute, which the pipeline ignores.
    """

    drawn: ClassVar[list[tuple[float, ...]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.own = Own()

    def on_train_start(self) -> None:
        self.drawn.clear()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        before = self.own.draw()
        self.drawn.append(before)
        loss = F.cross_entropy(self.model(batch[0] * (1 + before[0])), batch[1])
        return loss * (1 + self.own.draw()[0])


def draw_own(rank: int, schedules: tuple[str, ...]) -> list[tuple[set[tuple[float, ...]], tuple[float, ...]]]:
    """Return the numbers that a training with each schedule has drawn, and the next number of each generator."""
    found = []
    for schedule in schedules:
        module = LitOwn().double()
        trainer = make_trainer(
            strategy=PipelineStrategy(schedule, microbatches=2),
            max_epochs=1,
            num_sanity_val_steps=0,
            precision="64-true",
        )
        trainer.fit(module, DataLoader(data(), batch_size=8, drop_last=True))
        found.append((set(module.drawn), module.own.draw()))
    return found


def test_generators_of_the_module_give_all_stages_the_same_numbers():
    """All stages draw the same numbers from generators of the module.

    Each micro-batch draws different numbers, and the first micro-batch of a batch draws the numbers of one process.
    """
    schedules = "1f1b", "pipedream"
    batches = len(data()) // 8
    plain = Own()
    of_one_process = [plain.draw() for _ in range(2 * batches + 1)]
    ranks = run_ranks(draw_own, 2, schedules, timeout=40)
    for schedule, (numbers, rest), other in zip(schedules, *ranks, strict=True):
        assert (numbers, rest) == other
        assert len(numbers) == 2 * batches
        if schedule == "1f1b":
            assert numbers.issuperset(of_one_process[: 2 * batches : 2])
            assert rest == of_one_process[-1]
