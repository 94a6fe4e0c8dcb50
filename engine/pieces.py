"""Token text, one piece per token, for streaming.

A token may end in the middle of a character; its piece is then empty and the next one carries the
whole character, so that the pieces always join to the decoded text. Knows a tokenizer only.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

CONTEXT = 6
"""Tokens decoded in front of a new one: spacing depends on neighbours."""


class PieceDecoder:
    """Turns a growing list of ids into pieces of text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._held = 0
        """Trailing tokens whose text is not out yet."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        self._held += 1
        start = max(0, len(self._ids) - self._held - CONTEXT)
        before = self._text(self._ids[start : len(self._ids) - self._held])
        now = self._text(self._ids[start:])
        if now.endswith("�"):
            return ""
        self._held = 0
        return now[len(before) :]

    def flush(self) -> str:
        """What is still held back, replacement characters included."""
        if not self._held:
            return ""
        start = max(0, len(self._ids) - self._held - CONTEXT)
        before = self._text(self._ids[start : len(self._ids) - self._held])
        self._held = 0
        return self._text(self._ids[start:])[len(before) :]

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def pieces_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """One piece for each id; they join to the decoded text."""
    decoder = PieceDecoder(tokenizer)
    out = [decoder.push(token_id) for token_id in ids]
    rest = decoder.flush()
    if rest:
        out[-1] += rest
    return out
