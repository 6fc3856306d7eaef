"""Find the other ranks by a store of torch.distributed, such as the one of a process group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ringreduce.transports.base import not_assembled

_METHODS = ("add", "set", "get", "wait", "check", "delete_key")


def is_store(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in _METHODS)


def of_store(store: Any, rank: int, size: int, timeout_s: float) -> Callable[[bytes], list[bytes]]:
    def collect(mine: bytes) -> list[bytes]:
        # All ranks use a store for the same rendezvous in the same order, so each rank counts them.
        counter = f"ringreduce/rendezvous of {rank}"
        number = store.add(counter, 1)
        keys = [f"ringreduce/{number}/{each}" for each in range(size)]
        store.set(keys[rank], mine)
        try:
            store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError:  # torch has no other type for a wait that ends
            missing = [each for each, key in enumerate(keys) if not store.check([key])]
            if not missing:
                raise
            store.delete_key(keys[rank])  # this rank may call `init` again
            store.add(counter, -1)
            raise not_assembled(timeout_s, missing) from None
        return [store.get(key) for key in keys]

    return collect
