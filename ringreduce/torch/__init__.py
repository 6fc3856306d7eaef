"""PyTorch on ringreduce: ``torch.distributed.init_process_group("ringreduce")``.

`import torch` registers the backend (`registration`).  A process group (`group`) turns each
collective of torch into calls of a communicator, on views of the tensors (`tensors`).  `works` has
what torch waits for, and `memory` tensors in registered memory.
"""

from typing import TYPE_CHECKING, Any

from ringreduce.torch.registration import register as _register

if TYPE_CHECKING:
    from ringreduce.torch.memory import empty

__all__ = ["empty"]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first used: the registration imports no kernels."""
    if name in __all__:
        from ringreduce.torch import memory

        return getattr(memory, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_register()
