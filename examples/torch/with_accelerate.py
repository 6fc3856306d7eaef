"""Train a network on handwritten digits with Accelerate.

Accelerate asks torch for Gloo by name on the CPU.  One call has been added, and its import: it
gives Accelerate this backend in the place of Gloo.  ``ringreduce run --instead-of-gloo`` does the
same without it.

    torchrun --nproc-per-node 2 examples/torch/with_accelerate.py

prints

    2 ranks, 20 epochs in … s: … % of the held-out digits are right
"""

import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import ringreduce as rr
import ringreduce.torch

EPOCHS, BATCH = 20, 64

ringreduce.torch.instead_of("gloo")  # before: nothing
accelerator = Accelerator(cpu=True)
torch.set_num_threads(1)
torch.manual_seed(0)
data = rr.train.load_split()
samples = TensorDataset(torch.from_numpy(data.train_x), torch.from_numpy(data.train_labels))
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.SGD(model.parameters(), lr=0.5),
    DataLoader(samples, batch_size=BATCH, shuffle=True),
)
began = time.perf_counter()
for _ in range(EPOCHS):
    for images, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
seconds = time.perf_counter() - began
found = model(torch.from_numpy(data.held_out_x)).argmax(dim=1)
right = 100 * (found == torch.from_numpy(data.held_out_labels)).float().mean()
size = accelerator.num_processes
accelerator.print(
    f"{size} ranks, {EPOCHS} epochs in {seconds:.2f} s: "
    f"{right:.1f} % of the held-out digits are right"
)
accelerator.end_training()
