"""A pytest plugin, ``-p tests.support.unshrunk``, for runs that only ask whether tests fail.

Hypothesis then draws the same each time, and shrinks nothing.
"""

from __future__ import annotations

from hypothesis import Phase, settings

from tests.support import unclocked  # noqa: F401

settings.register_profile(
    "unshrunk", derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("unshrunk")
