"""Tensors whose storage is moved to registered memory, in place.

1. torch copies the storage to a new file and maps the file (`UntypedStorage._share_fd_cpu_`).  All
   tensors with this storage get the new address.
2. `move` copies the data to pages of this rank's segment.
3. mremap maps these pages at the address of torch's mapping.  The peers now reach the tensor's
   memory, and the address that torch knows stays valid.
4. When torch frees the storage, it unmaps these pages.

torch must not resize the storage, since its file is empty by then.  For the same reason other
processes, such as the readers of a queue of torch.multiprocessing, get a copy of the storage.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef, reduce_storage

import ringreduce as rr
from ringreduce.calls.views import forbid_resizing_storage
from ringreduce.torch.tensors import array_of

LEAST_BYTES = 64 << 10
"""Bytes.  Smaller storages stay: a move takes a file and a mapping, and would save little time."""
_MAY_MOVE, _FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value
_FILES_OF_TORCH = "/dev/shm"
_MOST_NOTED = 1000
"""From this number of entries in `_reduced_once` on, the entries of freed storages are removed."""
_MOST_MOVED = 256
"""The most storages of a group in registered memory: torch keeps a file open for each."""

_COPIES = "_ringreduce_copies"
"""Attribute of a process that is started: the copies that it gets.  They live as long as it."""
_COPIED: dict[int, StorageWeakRef] = {}
"""By address: the storages of which other processes get copies."""


class SharedStorages:
    def __init__(self, comm: rr.Communicator) -> None:
        self._comm = comm
        self._moved: dict[int, tuple[StorageWeakRef, np.ndarray]] = {}
        """By address of a storage: the registered memory that it is in."""
        self._reduced_once: dict[int, StorageWeakRef] = {}
        """By address: storages that were reduced once."""

    def array_of(self, tensor: Any, *, moves: bool) -> np.ndarray | None:
        """Return an array in registered memory over a contiguous tensor; None if it is not there.

        With `moves`, a storage moves there when it is reduced the second time.
        """
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not self.has(storage):
            moves = moves and can_move(storage)
            if not (moves and self._is_second_reduction(storage) and self.move(storage)):
                return None
            address = storage.data_ptr()
        _, memory = self._moved[address]
        begin = tensor.data_ptr() - address
        data: np.ndarray = memory[begin : begin + tensor.nbytes]
        return data.view(_dtype_of(tensor.dtype)).reshape(tuple(tensor.shape))

    def has(self, storage: Any) -> bool:
        address = storage.data_ptr()
        self._forget_freed(self._moved, address)
        return address in self._moved and self._moved[address][0] == StorageWeakRef(storage)

    def _is_second_reduction(self, storage: Any) -> bool:
        """Note that a storage is reduced; return whether it was reduced before."""
        address = storage.data_ptr()
        self._forget_freed(self._reduced_once, address)
        if address in self._reduced_once:
            return True
        if len(self._reduced_once) >= _MOST_NOTED:
            for noted in list(self._reduced_once):
                self._forget_freed(self._reduced_once, noted)
        self._reduced_once[address] = StorageWeakRef(storage)
        return False

    def move(self, storage: Any) -> bool:
        """Move a storage to registered memory; return whether there was room for it."""
        for address in list(self._moved):
            self._forget_freed(self._moved, address)
        nbytes = storage.nbytes()
        # Every rank may move a storage now.
        if len(self._moved) >= _MOST_MOVED or _room() < 2 * self._comm.size * nbytes:
            return False
        whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = self._comm._engine.executables.pages(whole)
        if memory is None:
            return False
        self._reduced_once.pop(storage.data_ptr(), None)
        file, _ = storage._share_fd_cpu_()
        address = storage.data_ptr()
        forbid_resizing_storage(storage)
        ctypes.memmove(memory.ctypes.data, address, nbytes)
        if not _map_pages_at(memory.ctypes.data, whole, address):
            return False  # it stays in torch's file
        os.ftruncate(file, 0)  # nothing maps its pages any more
        self._moved[address] = StorageWeakRef(storage), memory[:nbytes]
        _copied_when_sent(storage)
        return True

    def _forget_freed(self, found: dict[int, Any], address: int) -> None:
        entry = found.get(address)
        reference = entry[0] if isinstance(entry, tuple) else entry
        if reference is not None and reference.expired():
            del found[address]


def _copied_when_sent(storage: Any) -> None:
    """Have torch send copies of a storage to other processes from now on."""
    for address in [each for each, moved in _COPIED.items() if moved.expired()]:
        del _COPIED[address]
    _COPIED[storage.data_ptr()] = StorageWeakRef(storage)
    ForkingPickler.register(torch.UntypedStorage, _reduce)


def _reduce(storage: Any) -> Any:
    """Return what torch sends of a storage: a function that makes it, and its arguments."""
    moved = _COPIED.get(storage.data_ptr()) if storage.device.type == "cpu" else None
    if moved is None or moved != StorageWeakRef(storage):
        return reduce_storage(storage)
    copy, process = storage.clone(), get_spawning_popen()
    if process is not None:  # the copy's file must stay open until the process has started
        vars(process).setdefault(_COPIES, []).append(copy)
    return reduce_storage(copy)


def can_move(storage: Any) -> bool:
    """Whether a storage may move: torch owns its memory, and no array of NumPy views it."""
    return bool(storage.resizable() and not storage.is_shared())


def _room() -> int:
    try:
        files = os.statvfs(_FILES_OF_TORCH)
    except OSError:
        return 0
    return files.f_bavail * files.f_frsize


@cache
def _dtype_of(dtype: Any) -> np.dtype[Any]:
    return array_of("", torch.empty(0, dtype=dtype, device="cpu"), writes=False).dtype


def _map_pages_at(source: int, nbytes: int, target: int) -> bool:
    # Of shared memory, 0 bytes to move means to map all pages a second time.
    anywhere = _mremap(source, 0, nbytes, _MAY_MOVE, 0)
    if anywhere is None:
        return False
    return _mremap(anywhere, nbytes, nbytes, _MAY_MOVE | _FIXED, target) == target


def _mremap(address: int, before: int, after: int, flags: int, there: int) -> int | None:
    call = ctypes.CDLL(None).mremap
    call.restype = ctypes.c_void_p
    size = ctypes.c_size_t
    call.argtypes = [ctypes.c_void_p, size, size, ctypes.c_int, ctypes.c_void_p]
    found = call(address, before, after, flags, there)
    return None if found in (None, _FAILED) else int(found)
