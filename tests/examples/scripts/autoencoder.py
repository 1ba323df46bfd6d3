"""The first example of Lightning's documentation, on noise in the shape of MNIST because nothing can be downloaded."""

import lightning as L
import torch
from torch import nn, optim, utils


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

images = torch.rand(60, 1, 28, 28, generator=torch.Generator().manual_seed(1))
train_loader = utils.data.DataLoader(utils.data.TensorDataset(images, torch.zeros(60)), batch_size=8, shuffle=True)

trainer = L.Trainer(limit_train_batches=5, max_epochs=2)
trainer.fit(model=model, train_dataloaders=train_loader)
