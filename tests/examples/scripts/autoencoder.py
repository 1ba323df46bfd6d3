"""The starter example of Lightning's documentation, on noise in the shape of MNIST: nothing can be downloaded."""

import lightning as L
import torch
from torch import nn, optim, utils

L.seed_everything(0)


class LitAutoEncoder(L.LightningModule):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = nn.functional.mse_loss(x_hat, x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return optim.Adam(self.parameters(), lr=1e-3)


encoder = nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 3))
decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 28 * 28))
model = LitAutoEncoder(encoder, decoder)

dataset = utils.data.TensorDataset(torch.rand(500, 1, 28, 28), torch.randint(10, (500,)))
train_loader = utils.data.DataLoader(dataset, batch_size=32, shuffle=True)

trainer = L.Trainer(limit_train_batches=10, max_epochs=1)
trainer.fit(model=model, train_dataloaders=train_loader)
