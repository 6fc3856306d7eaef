"""Find out without CUDA, which may be broken, whether this machine has a CUDA GPU."""

from __future__ import annotations

from pathlib import Path


def has_gpu() -> bool:
    """Whether the system shows the device files of a GPU: NVIDIA's driver's, or those of WSL."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
