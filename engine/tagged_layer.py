"""What every cache layer that attends by itself has in common: it tags new keys for our attention function.

Knows how `adapter.py` finds such a layer; keeps no keys or values.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from engine.adapter import TAG, LogicalLength


class TaggedLayer(CacheLayerMixin):
    """A cache layer without storage of its own kind; subclasses add `attend`, see `adapter.Attends`.

    Attributes:
        seen: columns so far; subclasses count them.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def tag(self, key: Tensor) -> Tensor:
        """A view of the key that leads the attention function here."""
        tagged = key.view_as(key)
        setattr(tagged, TAG, self)
        return tagged

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Tags the new keys; the attention function stores and attends."""
        return self.tag(key_states), value_states

    def get_seq_length(self, *args: Any) -> int:
        """Logical columns seen, evicted ones included."""
        return self.seen

    def get_mask_sizes(self, query: Any, *args: Any) -> tuple[int, int]:
        """(logical key length, 0); `query` is a length, or cache positions in older releases."""
        length = query if isinstance(query, int) else int(query.shape[0])
        return LogicalLength(self.get_seq_length() + length), 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length
