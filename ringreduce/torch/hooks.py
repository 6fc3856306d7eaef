"""A communication hook for DistributedDataParallel, which reads the types that it declares."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def bfloat16_wire_hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks; send float32 and float64 as bfloat16.

    Sums are computed in the gradients' own dtype.  torch's `bf16_compress_hook` computes them in
    bfloat16.  Gradients of 16 bits are sent as they are.  The backward pass waits for the call.

    Args:
        group: a process group of this backend; None: all ranks.  `register_comm_hook` takes it as
            ``state``.
        bucket: the bucket that DistributedDataParallel passes.

    Returns:
        A future with the averaged bucket, which is a tensor of the bucket's shape and dtype.

    Raises:
        TypeError: `group` is no group of this backend.
        RuntimeError: there is no process group yet.

    Example:
        >>> model = DistributedDataParallel(model)  # doctest: +SKIP
        >>> model.register_comm_hook(None, ringreduce.torch.bfloat16_wire_hook)  # doctest: +SKIP
    """
    from ringreduce.torch.memory import group_of
    from ringreduce.torch.tensors import array_of

    group = group_of("bfloat16_wire_hook", group)
    gradients = bucket.buffer()
    x = array_of("bfloat16_wire_hook", gradients, writes=True, reduces=True)
    wire = "bfloat16" if x.dtype in (np.float32, np.float64) else None
    group.comm.all_reduce(x, "mean", out=x, wire=wire)
    future: Any = torch.futures.Future()
    future.set_result(gradients)
    return future
