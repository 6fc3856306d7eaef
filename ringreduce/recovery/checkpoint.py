"""Checkpoints: complete or absent, even if the process or the machine stops at any moment.

A checkpoint is two files: ``step-000000120.safetensors`` with the arrays, and the manifest
``step-000000120.json`` with the hashes of the arrays' file and of itself, and the dtypes of arrays
that are stored as bytes.  Each file is written under a temporary name, synchronised to disk, and
renamed; the manifest comes last.  Arrays without a manifest are no checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  NumPy knows its dtypes by name from then on
import numpy as np

from ringreduce.console.terminal import print_error

FORMAT = "ringreduce checkpoint 1"
_NAME = re.compile(r"step-\d{9}\.json")
_UNFINISHED = ".unfinished"
_FAILURES = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk that fails or is full.  Other errors mean that it lacks an operation."""

_STORABLE = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
}
"""Dtypes that safetensors writes, and reads as NumPy's arrays.  Others are stored as bytes."""

Arrays = Mapping[str, np.ndarray]
Facts = Mapping[str, Any]
"""Names and values that JSON can represent, without those in `RESERVED`."""
RESERVED = frozenset(
    ["format", "dtypes", "step", "tensors", "bytes", "sha256", "manifest_sha256", "generation"]
)
"""Names in a manifest that no fact of a program may have."""


class CheckpointError(ValueError):
    """A file is not a complete checkpoint of this run; the text names the file."""


@dataclass(frozen=True)
class Checkpoint:
    """A saved state."""

    step: int
    arrays: Arrays
    facts: Facts


class Reader:
    """A folder of checkpoints that is only read: its run may go on meanwhile.

    Raises CheckpointError if the folder is a file.
    """

    def __init__(self, path: Path) -> None:
        # Raise here, not after hours of training.
        try:
            import safetensors.numpy
        except ImportError:
            raise CheckpointError(
                "checkpoints need safetensors: pip install 'ringreduce[train]'"
            ) from None
        self._tensors: Any = safetensors.numpy
        self.path = path
        if path.exists() and not path.is_dir():
            raise CheckpointError(f"{path} is a file; name a folder for the checkpoints")

    def manifests(self) -> list[Path]:
        """Return the manifests of all checkpoints, damaged or not, the last step first."""
        if not self.path.exists():
            return []
        found = [path for path in self.path.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, reverse=True)

    def last(
        self, fits: Callable[[Checkpoint], None], refused: Callable[[str], None]
    ) -> Checkpoint | None:
        """Return the last usable checkpoint; None if the folder has no checkpoints.

        `fits` raises CheckpointError for a checkpoint of another run; its other errors end the
        search.  `refused` is called with the reason for every checkpoint that is passed over.
        Raises CheckpointError if there are checkpoints, but none can be used.
        """
        while manifests := self.manifests():
            for manifest in manifests:
                try:
                    checkpoint = self._load(manifest)
                except CheckpointError as error:
                    if manifest.exists():  # otherwise a run that goes on has removed it
                        refused(str(error))
                    continue
                try:
                    fits(checkpoint)
                    return checkpoint
                except CheckpointError as error:
                    refused(f"{manifest}: {error}")
            if manifests == self.manifests():
                raise CheckpointError(
                    f"none of the {len(manifests)} checkpoints in {self.path} can be used"
                )
        return None

    def _load(self, path: Path) -> Checkpoint:
        try:
            manifest = json.loads(path.read_bytes())
        except OSError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from None
        except ValueError:
            raise CheckpointError(f"{path} is damaged: it is no JSON") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise CheckpointError(f"{path} is no {FORMAT}")
        if manifest.pop("manifest_sha256", None) != _own_hash(manifest):
            raise CheckpointError(f"{path} is damaged: it does not have the hash that it states")
        tensors = path.with_name(manifest["tensors"])
        try:
            data = tensors.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(f"{path} is there, but {tensors.name} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{tensors} is damaged: {error}") from None
        if len(data) != manifest["bytes"] or hashlib.sha256(data).hexdigest() != manifest["sha256"]:
            raise CheckpointError(
                f"{tensors} is damaged: {len(data):,} bytes that do not match the hash in "
                f"{path.name}"
            )
        arrays = self._tensors.load(data)
        for name, dtype in manifest.get("dtypes", {}).items():
            arrays[name] = arrays[name].view(dtype)[..., 0]
        return Checkpoint(manifest["step"], arrays, manifest)


class Folder(Reader):
    """A folder of checkpoints, locked by one process at a time.

    Raises OSError if the folder cannot be made or written to, and CheckpointError if it is a file
    or if another process has locked it.
    """

    def __init__(self, path: Path, keep: int) -> None:
        super().__init__(path)
        self._keep = keep
        for missing in reversed([p for p in (path, *path.parents) if not p.exists()]):
            missing.mkdir(exist_ok=True)
            _sync(missing.parent)
        self._lock = open(path / ".lock", "w")  # noqa: SIM115  # held until close
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise CheckpointError(f"{path} is in use by another run") from None
        except OSError as error:  # Lustre without the option flock, some NFS and FUSE
            _note(f"{path} cannot be locked ({error.strerror}): let no other run use it")
        for left in path.glob(f"step-*{_UNFINISHED}"):
            left.unlink()

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.close()

    def check_new(self) -> None:
        """Raise CheckpointError if the folder has checkpoints."""
        if self.manifests():
            raise CheckpointError(
                f"{self.path} has checkpoints already; go on from them with --resume, or name "
                "another folder"
            )

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint and return its manifest; from then on it survives a power cut.

        Of the checkpoints up to this step only the last `keep` are kept.
        """
        stem = f"step-{checkpoint.step:09d}"
        arrays, as_bytes = dict(checkpoint.arrays), {}
        for name, array in arrays.items():
            if array.dtype.name not in _STORABLE:
                as_bytes[name] = array.dtype.name
                arrays[name] = np.asarray(array, order="C")[..., np.newaxis].view(np.uint8)
        data = self._tensors.save(arrays)
        manifest = {
            "format": FORMAT,
            **({"dtypes": as_bytes} if as_bytes else {}),
            "step": checkpoint.step,
            "tensors": f"{stem}.safetensors",
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            **checkpoint.facts,
        }
        manifest["manifest_sha256"] = _own_hash(manifest)
        # Remove an older manifest of the same step first: it would describe the new tensors.
        (self.path / f"{stem}.json").unlink(missing_ok=True)
        self._write(f"{stem}.safetensors", data)
        self._write(f"{stem}.json", json.dumps(manifest, indent=1).encode())
        before = [path for path in self.manifests() if path.name <= f"{stem}.json"]
        for path in before[self._keep :]:
            # The manifest first: tensors alone are no checkpoint, a manifest alone is damaged.
            path.unlink()
            path.with_suffix(".safetensors").unlink(missing_ok=True)
        return self.path / f"{stem}.json"

    # --- implementation ---

    def _write(self, name: str, data: bytes) -> None:
        path = self.path / name
        unfinished = self.path / f"{name}{_UNFINISHED}"
        try:
            _write_whole(unfinished, data)
            try:
                os.replace(unfinished, path)
            except OSError as error:
                if error.errno in _FAILURES:
                    raise
                _note(f"{self.path} has no renames ({error.strerror}): files are written in place")
                _write_whole(path, data)  # its hash tells whether it is whole
        except OSError as error:
            error.filename = str(path)  # that of a write names none
            raise
        finally:
            unfinished.unlink(missing_ok=True)  # the disk may be full
        _sync(self.path)


class Writer:
    """Writes checkpoints in a thread of its own, one after another.

    A checkpoint that cannot be written, as on a full disk, does not end the run: `complain` is
    called for the first one, and the checkpoints before it stay.
    """

    def __init__(self, folder: Folder, complain: Callable[[str], None]) -> None:
        self._folder, self._complain = folder, complain
        self._thread: threading.Thread | None = None
        self.failed: list[str] = []
        """Names of outputs that could not be written."""

    @property
    def is_idle(self) -> bool:
        """Whether every checkpoint that was begun is written."""
        return self._thread is None or not self._thread.is_alive()

    def begin(self, checkpoint: Checkpoint) -> None:
        """Wait for the previous checkpoint, copy the arrays, and begin to write them."""
        self.wait()
        arrays = {name: array.copy() for name, array in checkpoint.arrays.items()}
        copy = Checkpoint(checkpoint.step, arrays, checkpoint.facts)
        self._thread = threading.Thread(target=self._write, args=(copy,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, checkpoint: Checkpoint) -> None:
        try:
            self._folder.save(checkpoint)
        except (OSError, ValueError, MemoryError) as error:
            if not self.failed:
                self.failed = [f"checkpoints, the first that of step {checkpoint.step}"]
                self._complain(f"no checkpoint after step {checkpoint.step}: {error}")


def interrupted_text(folder: Path | None) -> str:
    """Return where a run that was interrupted can go on, given its folder for checkpoints."""
    saved = [] if folder is None or not folder.is_dir() else Reader(folder).manifests()
    if not saved:
        return "interrupted; no checkpoint is saved"
    step = int(saved[0].stem.removeprefix("step-"))
    return f"interrupted; step {step} is saved in {folder}; go on from it with --resume"


def _write_whole(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    _sync(path)


def _sync(path: Path) -> None:
    """Sync a file or a folder to its disk, if the disk has syncs."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in _FAILURES:
            raise
        folder = path if path.is_dir() else path.parent
        _note(f"{folder} cannot be synced ({error.strerror}): a power cut may lose checkpoints")


@cache
def _note(text: str) -> None:
    """Print a note, once in a process."""
    print_error(f"ringreduce: {text}")


def _own_hash(manifest: Facts) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
