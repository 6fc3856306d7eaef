"""Train a network on handwritten digits with Lightning.

One line has changed: the strategy was ``DDPStrategy(process_group_backend="gloo")``.

    torchrun --nproc-per-node 2 examples/torch/with_lightning.py

prints

    2 ranks, 20 epochs in … s: … % of the held-out digits are right
"""

import os
import time

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

import ringreduce as rr

EPOCHS, BATCH = 20, 64


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layers = torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10)
        self.model = torch.nn.Sequential(*layers)

    def training_step(self, batch, _):
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


torch.set_num_threads(1)
size = int(os.environ["WORLD_SIZE"])
strategy = DDPStrategy(process_group_backend="ringreduce")  # before: "gloo"
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
quiet |= {"enable_model_summary": False}
lightning.seed_everything(0, verbose=False)
trainer = lightning.Trainer(
    accelerator="cpu", devices=size, strategy=strategy, max_epochs=EPOCHS, **quiet
)
data = rr.train.load_split()
samples = TensorDataset(torch.from_numpy(data.train_x), torch.from_numpy(data.train_labels))
module, began = Digits(), time.perf_counter()
trainer.fit(module, DataLoader(samples, batch_size=BATCH, shuffle=True))
seconds = time.perf_counter() - began
found = module.model(torch.from_numpy(data.held_out_x)).argmax(dim=1)
right = 100 * (found == torch.from_numpy(data.held_out_labels)).float().mean()
if trainer.is_global_zero:
    print(f"{size} ranks, {EPOCHS} epochs in {seconds:.2f} s: ", end="")
    print(f"{right:.1f} % of the held-out digits are right")
torch.distributed.destroy_process_group()
