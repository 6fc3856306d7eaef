"""Hypothesis without a clock: on a busy machine how long an example takes says nothing."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "unclocked",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("unclocked")
