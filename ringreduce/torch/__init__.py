"""PyTorch on ringreduce: ``torch.distributed.init_process_group("ringreduce")``.

`import torch` registers the backend (`registration`).  A process group (`group`) turns each
collective of torch into calls of a communicator, on views of the tensors (`tensors`), and returns a
Work (`works`).  `calling` accepts all forms of these calls, and shows them in torch's profiler and
debug modes.  `attributes` has what torch reads of a group, `reductions` the ops and the sparse
tensors, `lists` the lists of tensors, `functional` operators that compiled code calls.  `memory`
makes tensors in registered memory, and `shared` moves tensors there.  `hooks` has a hook for
DistributedDataParallel.  `gloo` puts the backend in the place of Gloo.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringreduce.torch.registration import register as _register

if TYPE_CHECKING:
    from ringreduce.torch.gloo import instead_of
    from ringreduce.torch.hooks import bfloat16_wire_hook
    from ringreduce.torch.memory import empty, share_

__all__ = ["bfloat16_wire_hook", "empty", "instead_of", "share_"]
_PLACES = {
    "bfloat16_wire_hook": "hooks",
    "empty": "memory",
    "instead_of": "gloo",
    "share_": "memory",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first used: the registration imports no kernels."""
    if name in _PLACES:
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_register()
