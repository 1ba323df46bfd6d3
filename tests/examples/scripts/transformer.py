"""Lightning's demo of a language model, on random words in the shape of WikiText2 because nothing can be downloaded."""

import lightning as L
import torch
from lightning.pytorch.demos import LightningTransformer
from torch.utils.data import DataLoader, TensorDataset


class Transformer(LightningTransformer):
    def prepare_data(self):
        pass

    def train_dataloader(self):
        words = torch.randint(50, (14, 36), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(words[:, :-1], words[:, 1:]), batch_size=4)


model = Transformer(vocab_size=50)
trainer = L.Trainer(max_epochs=1)
trainer.fit(model)
