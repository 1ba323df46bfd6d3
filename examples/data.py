"""Two ordinary LightningDataModules that do not download anything. Every process loads the same batches."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

Pair = tuple[Tensor, Tensor]


class Windows(Dataset[Pair]):
    """Random windows of a text: `context` bytes as the input, and the same window shifted by one byte as the target.

    Args:
        text: the bytes of the text, as a tensor of shape (length,).
        context: the number of bytes in a window.
        count: the number of windows.
        seed: the seed for the positions of the windows.
    """

    def __init__(self, text: Tensor, context: int, count: int, seed: int) -> None:
        if len(text) <= context:
            raise ValueError(f"a text of {len(text)} bytes holds no window of {context} + 1; lower data.context")
        self.text, self.context = text, context
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(len(text) - context, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Pair:
        window = self.text[self.starts[index] :][: self.context + 1].long()
        return window[:-1], window[1:]


class StdlibText(L.LightningDataModule):
    """The source text of the standard library of this Python, as bytes. Every 20th file is used for validation."""

    def __init__(
        self, context: int = 128, windows: int = 6400, batch_size: int = 32, seed: int = 0, root: str | None = None
    ) -> None:
        super().__init__()
        self.context, self.windows, self.batch_size, self.seed = context, windows, batch_size, seed
        self.root = Path(root or sysconfig.get_path("stdlib"))

    def setup(self, stage: str) -> None:
        files = sorted(
            path
            for path in self.root.rglob("*.py")
            if not {"site-packages", "dist-packages"}.intersection(path.relative_to(self.root).parts)
        )
        if len(files) < 20:
            raise FileNotFoundError(
                f"{self.root} holds {len(files)} Python source files, at least 20 are needed: this Python came without "
                "the source of its standard library; choose data=digits model=mlp, or another Python"
            )
        self.train = self._windows([f for i, f in enumerate(files) if i % 20], self.windows)
        self.val = self._windows(files[::20], max(1, self.windows // 20))

    def _windows(self, files: list[Path], count: int) -> Windows:
        text = bytearray().join(path.read_bytes() for path in files)
        return Windows(torch.frombuffer(text, dtype=torch.uint8), self.context, count, self.seed)

    def train_dataloader(self) -> DataLoader[Pair]:
        return DataLoader(self.train, self.batch_size)  # the windows are already in random order

    def val_dataloader(self) -> DataLoader[Pair]:
        return DataLoader(self.val, self.batch_size)


class Digits(L.LightningDataModule):
    """The 1797 handwritten digits of scikit-learn, of shape (1, 8, 8) with values from 0 to 1. A fifth is used for
    validation."""

    def __init__(self, batch_size: int = 32, seed: int = 0) -> None:
        super().__init__()
        self.batch_size, self.seed = batch_size, seed

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed))
        train, val = order[len(order) // 5 :], order[: len(order) // 5]
        self.train = TensorDataset(images[train], labels[train])
        self.val = TensorDataset(images[val], labels[val])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(self.seed)  # every process shuffles in the same way
        return DataLoader(self.train, self.batch_size, shuffle=True, generator=generator)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val, self.batch_size)
