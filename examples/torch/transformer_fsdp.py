"""Train a small transformer whose parameters are sharded by FSDP2 over a mesh of devices.

An image of a digit is a sequence of 8 rows.  One line has changed: the backend was "gloo".

    torchrun --nproc-per-node 2 examples/torch/transformer_fsdp.py

prints

    2 ranks, 6 epochs in … s: … % of the held-out digits are right
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ringreduce as rr

EPOCHS, BATCH, WIDTH = 6, 32, 32


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.scores = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 10)
        self.places = nn.Parameter(torch.randn(8, WIDTH) / 4)
        layer = {"dim_feedforward": 2 * WIDTH, "dropout": 0.0, "batch_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, **layer) for _ in range(2))

    def forward(self, images):
        x = self.rows(images.reshape(-1, 8, 8)) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.scores(x.mean(dim=1))


dist.init_process_group("ringreduce")  # before: "gloo"
rank, size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(0)
data = rr.train.load_split()
images, labels = torch.from_numpy(data.train_x), torch.from_numpy(data.train_labels)
model, mesh = Transformer(), init_device_mesh("cpu", (size,))
for part in (*model.layers, model):
    fully_shard(part, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
began = time.perf_counter()
for _ in range(EPOCHS):
    for batch in torch.randperm(len(images)).split(BATCH * size):
        mine = batch.tensor_split(size)[rank]
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
seconds = time.perf_counter() - began
found = model(torch.from_numpy(data.held_out_x)).argmax(dim=1)
right = 100 * (found == torch.from_numpy(data.held_out_labels)).float().mean()
if rank == 0:
    print(f"{size} ranks, {EPOCHS} epochs in {seconds:.2f} s: ", end="")
    print(f"{right:.1f} % of the held-out digits are right")
dist.destroy_process_group()
