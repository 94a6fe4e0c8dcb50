"""Property tests look at answers, never at the clock: a busy machine must not fail them."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("no_clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no_clock")
