"""Tests of batches that contain lists of samples: how they are cut, and training on them against one process."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from lightning_pipes.ir import PipelineError, Span
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.data.batches import (
    SampleLists,
    check_same,
    checksum_batch,
    copy_batch,
    join,
    reorder_samples,
    rows_of,
    sample_fingerprint,
    take_samples,
)
from tests.trainer import lit
from tests.trainer.lit import Case, Lit, differences, train_cases


class Pair(NamedTuple):
    x: Any
    y: Any


def t(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def boxes(n: int) -> dict[str, Any]:
    return {"boxes": t(n, 4), "labels": t(n)}


def last(*parts: Any) -> tuple[Any, ...]:
    return tuple(part[-1:] for part in parts)


X, Y, MASK = t(2, 3), t(2), t(5, 5)
VIEWS = [t(4, 3), t(4, 3) + 1]
IMAGES = (t(3, 4, 4), t(3, 5, 4))
SAME = (t(3, 4, 4),) * 4
NAMES = ["a", "b"]

# A batch, its number of samples, and the content of its last micro-batch of one sample.
BATCHES: dict[str, tuple[Any, int, Any]] = {
    "detection": ((t(3, 1, 4), D := [boxes(2), boxes(0), boxes(5)]), 3, last(t(3, 1, 4), D)),
    "detection, some boxes as samples": ((X, D := (boxes(1), boxes(2))), 2, last(X, D)),
    "images and targets in tuples": ((IMAGES, D := (boxes(1), boxes(3))), 2, last(IMAGES, D)),
    "images of one size, and numbers": ((SAME, D := (0, 1, 2, 0)), 4, last(SAME, D)),
    "images of one size, and a tensor": ([[*SAME], t(4)], 4, [*last([*SAME], t(4))]),
    "targets first": ((D := [boxes(2), boxes(1)], X), 2, last(D, X)),
    "two columns of two samples": ((X, Y), 2, last(X, Y)),
    "two columns of two samples, in a list": ([X, X], 2, [*last(X, X)]),
    "two views of two samples": (([X, X], Y), 2, ([*last(X, X)], Y[-1:])),
    "two views of four samples": ((VIEWS, t(4)), 4, ([*last(*VIEWS)], t(4)[-1:])),
    "views only": ({"views": [*VIEWS, VIEWS[0]]}, 4, {"views": [*last(*VIEWS, VIEWS[0])]}),
    "two batches of dicts": ([{"x": X, "y": Y}] * 2, 2, [{"x": X[-1:], "y": Y[-1:]}] * 2),
    "a mask": ((X, MASK), 2, (X[-1:], MASK)),
    "a mask beside it in a tuple": ({"in": (X, MASK)}, 2, {"in": (X[-1:], MASK)}),
    "names": ({"x": X, "names": NAMES, "more": ("a", None)}, 2, {"x": X[-1:], "names": ["b"], "more": (None,)}),
    "other numbers": (D := {"x": X, "size": (4, 4, 4), "shape": torch.Size([3, 2])}, 2, {**D, "x": X[-1:]}),
    "graphs": ({"x": X, "edges": (D := [(t(4), t(4)), (t(1), t(1))])}, 2, {"x": X[-1:], "edges": D[-1:]}),
    "a dict of lists": (
        {"x": X, "y": {"b": IMAGES, "n": NAMES}},
        2,
        {"x": X[-1:], "y": {"b": IMAGES[-1:], "n": ["b"]}},
    ),
    "a named tuple": (Pair(X, D := [boxes(1), boxes(4)]), 2, Pair(*last(X, D))),
    "samples": (D := [{"x": t(5), "y": 1}, {"x": t(6), "y": 0}, {"x": t(5), "y": 2}], 3, D[-1:]),
    "one sample": (D := (t(1, 3), [boxes(3)]), 1, D),
}


@pytest.mark.parametrize("name", BATCHES)
def test_what_is_cut(name):
    """Check the number of samples and the last micro-batch of each batch.

    A single micro-batch must equal its batch.
    """
    batch, rows, wanted = BATCHES[name]
    assert rows_of(batch) == rows
    found = take_samples(batch, Span(rows - 1, rows), rows)
    assert same(found, wanted), found
    whole = take_samples(batch, Span(0, rows), rows)
    assert same(whole, batch), whole


def same(a: Any, b: Any) -> bool:
    leaves, spec = pytree.tree_flatten(a)
    others, other_spec = pytree.tree_flatten(b)
    return spec == other_spec and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(leaves, others, strict=True)
    )


def test_lists_of_samples_are_joined():
    spans = [Span(0, 2), Span(2, 5)]
    whole = {
        "boxes": [t(n, 4) for n in (2, 3, 0, 1, 5)],
        "y": t(5, 2),
        "names": ("a", "b", "c", "d", "e"),
        "mask": t(7),
    }
    parts = [take_samples(whole, span, 5) for span in spans]
    assert same(join(parts, spans, "it"), whole)
    with pytest.raises(PipelineError, match=r"it has lists of \[2, 2\] entries for \[2, 3\] samples"):
        join([[t(6), t(7)], [t(6), t(8)]], spans, "it")
    pair = [(t(2, 3), t(2, 1)), (t(3, 3), t(3, 1))]  # not a list of two samples
    assert same(join(pair, spans, "it"), tuple(map(torch.cat, zip(*pair, strict=True))))


SQUARE = (t(3, 2), [t(3, 4), t(3, 4) + 1, t(3, 4) + 2])
"""Either three images with three boxes each, or three columns of three samples."""
SQUARE_DICTS = ({"x": t(3, 2)}, [{"boxes": t(3, 4), "labels": t(3)}] * 3)


@pytest.mark.parametrize("batch", [SQUARE, SQUARE_DICTS])
def test_what_one_batch_does_not_tell_an_earlier_one_does(batch):
    """Check that a list whose meaning is ambiguous is cut like the list of an earlier batch, or else with a warning."""
    images, boxes = batch
    entry, lists = boxes[0], SampleLists()

    def taken(batch: Any, rows: int) -> tuple[int, int]:
        """Return the length of the list in the last micro-batch of one sample, and the rows of its first entry."""
        (_, part) = take_samples(batch, Span(rows - 1, rows), rows, samples=lists.find_lists(batch, rows))
        return len(part), len(part[0] if isinstance(part[0], torch.Tensor) else part[0]["boxes"])

    def of(rows: int) -> Any:
        return pytree.tree_map(lambda x: torch.cat([x, x])[:rows], entry)

    other_images = pytree.tree_map(lambda x: torch.cat([x, x])[:4], images)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert taken((images, [of(2), of(3), of(1)]), 3) == (1, 1)
        assert taken(batch, 3) == (1, 3)
        assert taken((other_images, [of(4)] * 3), 4) == (3, 1)  # the entries are columns
        assert taken(batch, 3) == (3, 1)
    lists = SampleLists()
    with pytest.warns(UserWarning, match=r"3 samples has a list of 3 entries whose tensors have 3 rows each.*image_id"):
        assert taken(batch, 3) == (3, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert taken(batch, 3) == (3, 1)
        assert taken((images, [of(2), of(3), of(1)]), 3) == (1, 1)
        assert taken(batch, 3) == (1, 3)


class Targets(Dataset[Any]):
    """Samples with different numbers of boxes, and with a name."""

    def __init__(self, rows: int) -> None:
        self.x, self.y = lit.data(rows).tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, n: int) -> Any:
        x, y = self.x[n], self.y[n]
        return x, {"boxes": x.repeat(1 + n % 3, 1), "label": y}, f"{n}"


class LitTargets(Lit):
    """A module that pairs each sample with its target by `zip`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.logged("train_loss", *batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.logged("val_loss", *batch)

    def logged(self, name: str, xs: Any, targets: Any, names: Any) -> torch.Tensor:
        assert len(xs) == len(targets) == len(names)
        losses = [
            F.cross_entropy(logits, target["label"]) * (1 + target["boxes"].mean()) / (1 + int(number))
            for logits, target, number in zip(self(torch.stack(list(xs))), targets, names, strict=True)
        ]
        loss = torch.stack(losses).mean()
        self.log(name, loss, batch_size=len(xs))  # Lightning cannot infer the batch size
        return loss

    def on_validation_epoch_end(self) -> None:
        pass


class OfList(nn.Module):
    """A first layer whose input is a list with one tensor per sample."""

    def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([x.mean(0) for x in xs])


class LitListIn(LitTargets):
    def __init__(self) -> None:
        super().__init__()
        self.model.insert(0, OfList())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model([row.repeat(1 + int(row[0] > 0), 1) for row in x])


class LitBoxes(Lit):
    """Images of one size with their own boxes.

    In the second batch, each image has as many boxes as there are images.
    """

    def loss(self, batch: Any) -> torch.Tensor:
        xs, boxes, labels = batch
        assert len(xs) == len(boxes)
        losses = F.cross_entropy(self(xs), labels, reduction="none")
        return torch.stack([loss * (1 + b.square().mean()) for loss, b in zip(losses, boxes, strict=True)]).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=5)

    def on_validation_epoch_end(self) -> None:
        pass


def boxed(samples: list[Any]) -> Any:
    """Collate samples into tensors, with one tensor of boxes per sample."""
    xs = torch.stack([x for x, *_ in samples])
    square = samples[0][2] == "8"
    boxes = [x[None].repeat(len(samples), 1) if square else target["boxes"] for x, target, _ in samples]
    return xs, boxes, torch.stack([target["label"] for _, target, _ in samples])


def collated(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


def train_targets(rank: int, cases: list[Case], ranks: int, folder: str) -> list[dict[str, Any]]:
    """Train the cases on samples with targets, which replace the usual data."""

    def of(case: Case) -> Any:
        return boxed if case.module is LitBoxes else collated

    lit.loaders = lambda case: {  # type: ignore[assignment]
        "train_dataloaders": DataLoader(Targets(lit.ROWS), batch_size=8, collate_fn=of(case)),
        "val_dataloaders": DataLoader(Targets(13), batch_size=5, collate_fn=of(case)),
    }
    return train_cases(rank, cases, ranks, folder)


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (1, "interleaved")])
def test_training_on_targets_equals_one_process(ranks, schedule):
    kinds = (LitTargets, LitListIn, LitBoxes)
    cases = [Case(kind, strategy={"schedule": schedule, "microbatches": 3}) for kind in kinds]
    plain = run_ranks(train_targets, 1, [case.plain() for case in cases], 1, mkdtemp(), timeout=180)[0]
    for found in run_ranks(train_targets, ranks, cases, ranks, mkdtemp(), timeout=180):
        for mine, one in zip(found, plain, strict=True):
            for what in ("outputs", "weights", "metrics", "steps"):
                assert differences(mine[what], one[what], at=what) == []


def test_take_cuts_what_counts_samples():
    x = torch.arange(12).view(6, 2)
    batch = {"pair": Pair(x, [x[:, 0], 7]), "names": list("abcdef"), "weights": torch.ones(3), "flag": True}
    part = take_samples(batch, Span(2, 4), 6)
    assert part["pair"].x.tolist() == [[4, 5], [6, 7]]
    assert part["pair"].y[0].tolist() == [4, 6]
    assert part["pair"].y[1] == 7
    assert part["names"] == ["c", "d"]
    assert part["weights"] is batch["weights"]
    assert part["flag"] is True


def test_rows_of():
    assert rows_of({"x": torch.ones(5, 2)}) == 5
    assert rows_of({"temperature": torch.tensor(2.0), "names": ["a"], "pair": Pair(None, [torch.ones(4), 1])}) == 4
    with pytest.raises(PipelineError, match="the number of samples in a batch of type dict is unknown"):
        rows_of({})
    with pytest.raises(PipelineError, match="axis 0 counts samples"):
        rows_of([torch.tensor(1.0), "abc"])
    with pytest.raises(PipelineError, match=r"batch of type SimpleNamespace .*; make it a dict, tuple, list or data"):
        rows_of(SimpleNamespace(x=torch.ones(5, 2)))
    assert rows_of(SimpleNamespace(x=torch.ones(5, 2)), cut=False) == 1
    assert rows_of({"x": torch.ones(5, 2)}, cut=False) == 5


def test_join_is_the_other_direction_of_take():
    x = {"a": torch.randn(7, 2), "b": (torch.arange(7), None)}
    spans = [Span(0, 3), Span(3, 7)]
    whole = join([{"a": x["a"][a:b], "b": (x["b"][0][a:b], None)} for a, b in spans], spans, "it")
    assert torch.equal(whole["a"], x["a"])
    assert torch.equal(whole["b"][0], x["b"][0])
    masks = [torch.ones(1, 4), torch.ones(1, 4)]
    assert join([{"mask": m} for m in masks], spans, "it")["mask"] is masks[0]
    with pytest.raises(PipelineError, match=r"it for 3 samples has shape \(1, 4\)"):
        join([torch.ones(1, 4), torch.zeros(1, 4)], spans, "it")
    with pytest.raises(PipelineError, match=r"it for 3 samples has shape \(2, 3\); axis 0 must count samples"):
        join([torch.ones(2, 3), torch.ones(2, 4)], spans, "it")


def test_fingerprint_sees_values_shapes_and_types():
    x = torch.arange(6.0)
    others = [x.view(2, 3), x.double(), x + 1e-6 * (x == 3), x.flip(0)]
    assert len({checksum_batch({"x": t}) for t in (x, *others)}) == 5
    assert checksum_batch([x, "a"]) == checksum_batch([x.clone(), "b"])
    with pytest.raises(PipelineError, match="training, batch 0: the ranks of one pipeline loaded different batches"):
        check_same(["a", "b"], [0, 1], "training, batch 0")


def test_sampled_fingerprint_sees_other_samples_in_little_time():
    x = torch.randn(64, 3, 50, 50)
    others = [x.double(), x[:32], x.roll(1, 0), x + (torch.arange(64) == 5).view(-1, 1, 1, 1)]
    assert len({sample_fingerprint({"x": t}) for t in (x, *others)}) == 5
    assert sample_fingerprint([x, "a"]) == sample_fingerprint([x.clone(), "b"])
    small = torch.zeros(40)
    assert sample_fingerprint(small) != sample_fingerprint(small + (torch.arange(40) == 7))
    columns = torch.zeros(4096, 64)
    # each column is sampled
    assert sample_fingerprint(columns) != sample_fingerprint(columns + (torch.arange(64) == 3))
    assert sample_fingerprint(x.transpose(0, 1)) == sample_fingerprint(x.transpose(0, 1).contiguous())


@dataclass(frozen=True)
class FrozenBatch:
    x: Any
    y: Any


class ObjectBatch:
    """A library's batch class, which is not a known container."""

    def __init__(self, x: Any) -> None:
        self.x = x


def _nested(factor: float, layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), factor * torch.ones(4, 3), torch.zeros(1, 3)], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
def test_checksums_of_tensors_of_other_layouts():
    z = torch.tensor([1 + 2j, 3 - 1j])
    made = [
        lambda n: _nested(n, torch.jagged),
        lambda n: _nested(n, torch.strided),
        lambda n: (n * torch.eye(3)).to_sparse_csr(),
        lambda n: (n * z).conj(),
        lambda n: (n * z).conj().imag,
        lambda n: FrozenBatch(n * torch.ones(2), 3),
        lambda n: ObjectBatch(n * torch.ones(2)),
    ]
    for make in made:
        assert checksum_batch({"x": make(1)}) == checksum_batch({"x": make(1)})
        assert checksum_batch({"x": make(1)}) != checksum_batch({"x": make(2)})
    for make in made[:-1]:
        assert sample_fingerprint({"x": make(1)}) != sample_fingerprint({"x": make(2)})


def test_frozen_dataclasses_and_objects_are_cut_and_copied():
    batch = FrozenBatch(torch.arange(6.0).reshape(3, 2), {"y": torch.arange(3)})
    part = take_samples(batch, Span(1, 3), 3)
    assert isinstance(part, FrozenBatch)
    assert part.x.tolist() == [[2, 3], [4, 5]]
    assert part.y["y"].tolist() == [1, 2]
    copied = copy_batch((batch, ObjectBatch(batch.x)))
    copied[0].x.zero_()
    copied[1].x.zero_()
    assert batch.x.any()


def test_nested_tensors_are_cut_by_sample():
    nested = _nested(5, torch.jagged)
    assert rows_of({"x": nested}) == 3
    part = take_samples({"x": nested}, Span(1, 3), 3)["x"]
    assert [each.tolist() for each in part.unbind()] == [each.tolist() for each in nested.unbind()[1:]]
    assert take_samples({"x": nested}, Span(0, 3), 3)["x"] is nested


def test_masks_of_flex_attention() -> None:
    """The function of a mask gets the numbers of the samples in the whole batch; a mask of all samples is not cut."""
    lengths = torch.tensor([9, 2, 5, 7])

    def is_seen(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (kv < lengths[b])

    def is_earlier(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv

    def made(mask: Any) -> torch.Tensor:
        return create_mask(mask.mask_mod, *mask.shape, device="cpu")

    own, shared = (
        create_block_mask(seen, rows, None, 9, 9, device="cpu", BLOCK_SIZE=4)
        for seen, rows in ((is_seen, 4), (is_earlier, None))
    )
    batch, dense = {"x": t(4, 9), "mask": own, "shared": shared}, made(own)
    part = take_samples(batch, Span(1, 3), 4)
    assert torch.equal(made(part["mask"]), dense[1:3])
    assert torch.equal(part["mask"].kv_num_blocks, own.kv_num_blocks[1:3])
    assert part["shared"] is shared
    order = [3, 0, 2, 1]
    moved = reorder_samples(batch, 4, order)
    assert torch.equal(made(moved["mask"]), dense[order])
    assert torch.equal(made(take_samples(moved, Span(2, 4), 4)["mask"]), dense[order][2:])
