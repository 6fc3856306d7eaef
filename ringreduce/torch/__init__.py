"""PyTorch on ringreduce: ``torch.distributed.init_process_group("ringreduce")``.

`import torch` registers the backend (`registration`).  A process group (`group`) turns each
collective of torch into calls of a communicator, on views of the tensors (`tensors`).  `works` has
what torch waits for.
"""

from ringreduce.torch.registration import register as _register

_register()
