# A program as others write it, without types.
# mypy: ignore-errors
"""Trains with Lightning's `Trainer` on the CPU over backend argv[1]; writes what came of it as JSON into argv[2]."""

import json
import os
import sys
import warnings
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 4))
        self.losses, self.backend, self.group = [], None, None

    def training_step(self, batch, at):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train", loss, sync_dist=True, on_epoch=True)
        self.losses.append(loss.item())
        self.backend, self.group = dist.get_backend(), type(dist.group.WORLD).__name__
        return loss

    def validation_step(self, batch, at):
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self):
        self.losses += self.all_gather(torch.tensor(float(self.global_rank))).tolist()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


def main(backend, folder):
    strategy = "ddp"
    if backend == "aiodist":
        import aiodist.c10d.lightning  # noqa: F401

        strategy = "aiodist"
    rank = int(os.environ["LOCAL_RANK"])
    lightning.seed_everything(0)
    data = TensorDataset(torch.randn(53, 16), torch.randn(53, 4))
    keep = ModelCheckpoint(folder / f"lightning-{backend}", monitor="val", save_top_k=1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=3,
        sync_batchnorm=False,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[keep, EarlyStopping("val", patience=5)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    task = Task()
    trainer.fit(task, DataLoader(data, 5, shuffle=True), DataLoader(data, 7))
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    tested = trainer.validate(task, DataLoader(data, 7), ckpt_path="best", verbose=False)
    found = {"losses": task.losses, "metrics": metrics, "tested": tested, "best": keep.best_model_score.item()}
    text = json.dumps({**found, "backend": task.backend, "group": task.group})
    (folder / f"{backend}-{rank}.json").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
