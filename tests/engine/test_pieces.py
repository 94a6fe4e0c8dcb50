"""Pieces always join to the decoded text."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from engine.pieces import PieceDecoder, pieces_of
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def whole(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@settings(max_examples=200)
@given(st.text(max_size=40))
def test_pieces_of_text_join_to_it(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    pieces = pieces_of(TOKENIZER, ids)
    assert len(pieces) == len(ids) and "".join(pieces) == whole(ids)
    decoder = PieceDecoder(TOKENIZER)
    assert "".join([decoder.push(token) for token in ids] + [decoder.flush()]) == text


@settings(max_examples=200)
@given(st.lists(st.integers(0, 259), max_size=40))
def test_pieces_of_any_tokens_join_to_the_decoded_text(ids: list[int]) -> None:
    """Also of bytes that are no text: what is broken stays broken, and nothing is lost or doubled."""
    assert "".join(pieces_of(TOKENIZER, ids)) == whole(ids)


@pytest.mark.parametrize("character, tokens", [("é", 2), ("漢", 3), ("😀", 4)])
def test_a_character_of_several_tokens_comes_whole(character: str, tokens: int) -> None:
    ids = TOKENIZER("a" + character + "b", add_special_tokens=False)["input_ids"]
    assert pieces_of(TOKENIZER, ids) == ["a", *[""] * (tokens - 1), character, "b"]


def test_what_is_cut_off_is_flushed() -> None:
    decoder = PieceDecoder(TOKENIZER)
    assert [decoder.push(token) for token in "漢".encode()[:2]] == ["", ""]
    assert decoder.flush() == "�"
    assert decoder.flush() == ""


def test_nothing_gives_nothing() -> None:
    assert pieces_of(TOKENIZER, []) == []
