"""The signature of a call, and the header that its first messages carry."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import blake2b

DIGEST_BYTES = 16
"""Bytes of a signature's digest."""
NUMBER_BYTES = 8
"""Bytes of a call number, the least significant first."""
HEADER_BYTES = DIGEST_BYTES + NUMBER_BYTES
"""Bytes of a header: the digest, then the call number."""


@dataclass(frozen=True)
class Signature:
    """The collective of a call, and every argument that all ranks must pass alike."""

    collective: str
    arguments: tuple[tuple[str, str], ...]
    """Names and values, as texts for errors."""
    digest: bytes = field(init=False)
    """A hash of the collective and the arguments: DIGEST_BYTES bytes."""

    def __post_init__(self) -> None:
        text = json.dumps([self.collective, self.arguments])
        object.__setattr__(
            self, "digest", blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
        )


def number_of(header: bytes) -> int:
    return int.from_bytes(header[DIGEST_BYTES:HEADER_BYTES], "little")
