"""The palette keeps its promises to every eye, and the style sheet holds the same colours."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from visuals.palette import (
    BAR_HEIGHTS,
    DEFICIENCIES,
    METHODS,
    MIN_CONTRAST,
    MIN_DISTANCE_CVD,
    MIN_DISTANCE_NORMAL,
    MIN_TEXT_CONTRAST,
    PALETTES,
    THEMES,
    Theme,
    blend,
    contrast,
    css_variables,
    distance,
    oklab,
    rgb,
    worst_distance,
)
from visuals.replay import ASSETS

COLORS = st.integers(0, 0xFFFFFF).map(lambda value: f"#{value:06X}")


@pytest.mark.parametrize("theme", THEMES)
def test_tiers_can_be_told_apart(theme: Theme) -> None:
    assert worst_distance(theme)[0] >= MIN_DISTANCE_NORMAL
    for vision in DEFICIENCIES:
        assert worst_distance(theme, vision)[0] >= MIN_DISTANCE_CVD, vision


@pytest.mark.parametrize("theme", THEMES)
def test_everything_stands_out_from_the_paper(theme: Theme) -> None:
    palette = PALETTES[theme]
    for name, color in palette.tiers.items():
        assert contrast(color, palette.paper) >= MIN_CONTRAST, name
    for name in ("full", "quant", "evicted"):
        assert contrast(getattr(palette, name), palette.panel) >= MIN_CONTRAST, name
    for name in ("ink", "muted", "alarm"):
        for surface in (palette.paper, palette.panel):
            assert contrast(getattr(palette, name), surface) >= MIN_TEXT_CONTRAST, name
    assert contrast(palette.ring, palette.full) >= 1.5 or contrast(palette.ring, palette.paper) >= 12
    for method, style in METHODS.items():
        assert contrast(style.color(theme), palette.paper) >= MIN_CONTRAST, method


@pytest.mark.parametrize("theme", THEMES)
def test_words_on_tinted_tokens_stay_readable(theme: Theme) -> None:
    palette = PALETTES[theme]
    for name, color in palette.tiers.items():
        if name != "evicted":
            assert contrast(palette.ink, blend(color, palette.paper, 0.15)) >= MIN_TEXT_CONTRAST, name


def test_height_is_the_second_code() -> None:
    assert BAR_HEIGHTS["full"] == BAR_HEIGHTS["local"] == BAR_HEIGHTS["sink"] == 1.0
    assert 0.3 < BAR_HEIGHTS["quant"] < 0.5
    assert BAR_HEIGHTS["evicted"] == 0.0


def test_methods_differ_by_dash_and_marker_too() -> None:
    assert len({(style.dash, style.marker) for style in METHODS.values()}) == len(METHODS)


def test_known_values() -> None:
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21.0)
    assert oklab("#FFFFFF") == pytest.approx([1.0, 0.0, 0.0], abs=1e-4)
    assert distance("#FF0000", "#00FF00", "deutan") < distance("#FF0000", "#00FF00")
    with pytest.raises(ValueError, match="#RRGGBB"):
        rgb("red")


@given(COLORS, COLORS)
def test_measures_are_symmetric(first: str, second: str) -> None:
    assert contrast(first, second) == contrast(second, first)
    assert distance(first, second) == pytest.approx(distance(second, first))
    assert distance(first, first) == 0.0


def test_the_style_sheet_holds_these_colours() -> None:
    sheet = (ASSETS / "css" / "tier_view.css").read_text("utf-8")
    light, dark = sheet.split('.qe[data-theme="dark"] {')
    for theme, text in (("light", light), ("dark", dark)):
        found = re.findall(r"^\s*(--qe-\w+: #[0-9A-Fa-f]{6};)", text, re.M)
        assert found == [line.strip() for line in css_variables(theme).splitlines()]
