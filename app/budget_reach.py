"""A budget that a text cannot hold, raised to the smallest that it can. Knows neither runs nor where the words go."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from engine.config import QEvictConfig
from engine.errors import BudgetError

Made = TypeVar("Made")
ATTEMPTS = 3
"""A larger budget changes the recent region too, so that the first answer may need another."""


def within_reach(make: Callable[[QEvictConfig], Made], config: QEvictConfig) -> tuple[Made, QEvictConfig]:
    """What `make` makes of the settings, and those settings: its budget is raised while it is too small.

    Raises:
        BudgetError: no budget is known that holds the text.
    """
    for left in reversed(range(ATTEMPTS)):
        try:
            return make(config), config
        except BudgetError as error:
            # A text of a few windows does not fit any share: what is kept whole needs no window to spare.
            least = min(1.0, error.smallest_share)
            if not left or least <= 0.0 or config.kv_budget == 1.0:
                raise
            config = config.replace(kv_budget=least, kv_budget_bytes=None)
    raise RuntimeError("unreachable")
