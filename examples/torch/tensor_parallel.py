"""Train a network whose layers are divided between the ranks as DTensors: tensor parallelism.

The first layer is divided by columns, the second by rows.  All ranks compute on the same batch.
One line has changed: the backend was "gloo".

    torchrun --nproc-per-node 2 examples/torch/tensor_parallel.py

prints

    2 ranks, 20 epochs in … s: … % of the held-out digits are right
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ringreduce as rr

EPOCHS, BATCH = 20, 128

dist.init_process_group("ringreduce")  # before: "gloo"
size = dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(0)
data = rr.train.load_split()
images, labels = torch.from_numpy(data.train_x), torch.from_numpy(data.train_labels)
model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
mesh = init_device_mesh("cpu", (size,))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
began = time.perf_counter()
for _ in range(EPOCHS):
    for batch in torch.randperm(len(images)).split(BATCH):
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
seconds = time.perf_counter() - began
found = model(torch.from_numpy(data.held_out_x)).argmax(dim=1)
right = 100 * (found == torch.from_numpy(data.held_out_labels)).float().mean()
if dist.get_rank() == 0:
    print(f"{size} ranks, {EPOCHS} epochs in {seconds:.2f} s: ", end="")
    print(f"{right:.1f} % of the held-out digits are right")
dist.destroy_process_group()
