"""Damage to the content of a file."""

from __future__ import annotations


def flipped(content: bytes) -> bytes:
    """Return `content` with one bit of its middle byte flipped."""
    middle = len(content) // 2
    return content[:middle] + bytes((content[middle] ^ 1,)) + content[middle + 1 :]
