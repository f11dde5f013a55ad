"""A Lightning module with a TensorBoard logger is recorded by the program of docs/following-training.md."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

import rnnlens as rl

#: Warnings that Lightning itself causes: about its data loader, and about torch's pytree module.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]


class Forecaster(LightningModule):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(2, 6, batch_first=True), nn.Linear(6, 1)

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.gru(x)[0][:, -1]), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def test_lightning_with_tensorboard(tmp_path):
    data = torch.utils.data.TensorDataset(torch.randn(32, 9, 2), torch.randn(32, 1))
    watch = rl.lightning.Watch(tmp_path / "run.zarr", every=2, loggers=True)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[watch],
        logger=TensorBoardLogger(tmp_path / "logs"),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Forecaster(), torch.utils.data.DataLoader(data, batch_size=8))
    run = rl.open(tmp_path / "run.zarr")
    assert run.ended == "finished"
    assert "gru" in run
    assert list((tmp_path / "logs").rglob("events.out.tfevents*"))
