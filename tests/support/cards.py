"""Is there a CUDA card in this machine?  Asked without CUDA, which might be what is broken."""

from __future__ import annotations

from pathlib import Path


def has_card() -> bool:
    """Whether the system shows the device files of a card: NVIDIA's driver's, or those of WSL."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
