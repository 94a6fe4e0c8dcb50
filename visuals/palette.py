"""One colour per tier, surface and method, and the arithmetic that says whether they can be told apart.

Hue says how precisely a window is stored; height and position say it a second time, because no
palette survives every eye and every projector. Knows colours; knows no trace, no chart, no page.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Theme: TypeAlias = Literal["light", "dark"]
Vision: TypeAlias = Literal["normal", "protan", "deutan", "tritan"]

THEMES: Final[tuple[Theme, ...]] = ("light", "dark")
DEFICIENCIES: Final[tuple[Vision, ...]] = ("protan", "deutan", "tritan")

MIN_DISTANCE_NORMAL: Final = 12.0
"""Smallest OKLab distance x 100 between two tiers for normal vision."""
MIN_DISTANCE_CVD: Final = 9.5
"""The same under full protanopia, deuteranopia or tritanopia."""
MIN_CONTRAST: Final = 3.0
"""Smallest WCAG contrast of a tier against the paper."""
MIN_TEXT_CONTRAST: Final = 4.5
"""Smallest WCAG contrast of words against the paper and the panel."""


@dataclass(frozen=True, slots=True)
class Palette:
    """The colours of one theme as #RRGGBB.

    `sink` ... `evicted` are the tiers. `ink`, `muted` write, `paper`, `panel`, `line` lie below, `ring`
    circles a promotion, `focus` the keyboard, `alarm` a broken promise or an error.
    """

    sink: str
    local: str
    full: str
    quant: str
    evicted: str
    paper: str
    panel: str
    line: str
    ink: str
    muted: str
    ring: str
    focus: str
    alarm: str

    @property
    def tiers(self) -> dict[str, str]:
        """The five tier colours by name, in the order of `engine.trace.Tier`."""
        return {
            "sink": self.sink,
            "local": self.local,
            "full": self.full,
            "quant": self.quant,
            "evicted": self.evicted,
        }


PALETTES: Final[dict[Theme, Palette]] = {
    "light": Palette(
        sink="#250040",
        local="#4C9EB9",
        full="#03329B",
        quant="#C26A12",
        evicted="#646465",
        paper="#FFFFFF",
        panel="#F2F4F9",
        line="#D5DAE4",
        ink="#12151C",
        muted="#555E6E",
        ring="#12151C",
        focus="#0B57D0",
        alarm="#B3261E",
    ),
    "dark": Palette(
        sink="#CDA8F2",
        local="#8EF8F8",
        full="#3F95D8",
        quant="#F09A2E",
        evicted="#6E7178",
        paper="#0E1320",
        panel="#171E2E",
        line="#2E384D",
        ink="#EEF1F7",
        muted="#A3ADBF",
        ring="#FFFFFF",
        focus="#8AB4F8",
        alarm="#FF8A80",
    ),
}

BAR_HEIGHTS: Final[dict[str, float]] = {"sink": 1.0, "local": 1.0, "full": 1.0, "quant": 0.42, "evicted": 0.0}
"""Height of a tier's bar as a share of a Full one: a code, near the share of bytes, not a measurement."""


@dataclass(frozen=True, slots=True)
class MethodStyle:
    """How a method's curve is drawn: a colour and, as the second code, a dash and a marker (plotly names)."""

    light: str
    dark: str
    dash: str
    marker: str

    def color(self, theme: Theme) -> str:
        """The colour under `theme`."""
        return self.light if theme == "light" else self.dark


METHODS: Final[dict[str, MethodStyle]] = {
    "qevict": MethodStyle("#C26A12", "#F09A2E", "solid", "circle"),
    "fullkv": MethodStyle("#12151C", "#EEF1F7", "dot", "square"),
    "hard_eviction": MethodStyle("#03329B", "#3F95D8", "dash", "x"),
    "quant_only": MethodStyle("#2B7F86", "#8EF8F8", "dashdot", "diamond"),
    "streaming": MethodStyle("#7A1FA2", "#CDA8F2", "longdash", "triangle-up"),
    "other": MethodStyle("#646465", "#8A8E97", "longdashdot", "cross"),
}

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
_CVD: Final[dict[Vision, NDArray[np.float64]]] = {
    "normal": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
_LMS: Final = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_LAB: Final = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def rgb(color: str) -> tuple[int, int, int]:
    """Three bytes of a colour written "#RRGGBB".

    Raises:
        ValueError: not six hexadecimal digits after a #.
    """
    if len(color) != 7 or color[0] != "#":
        raise ValueError(f"a colour must be written #RRGGBB, got {color!r}.")
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def linear(color: str, vision: Vision = "normal") -> NDArray[np.float64]:
    """Linear-light RGB in [0, 1], shape [3], as an eye with `vision` receives it."""
    values = np.array(rgb(color), dtype=np.float64) / 255.0
    light = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    return np.clip(_CVD[vision] @ light, 0.0, 1.0)


def oklab(color: str, vision: Vision = "normal") -> NDArray[np.float64]:
    """OKLab coordinates (L, a, b), shape [3]."""
    lab: NDArray[np.float64] = _LAB @ np.cbrt(_LMS @ linear(color, vision))
    return lab


def distance(first: str, second: str, vision: Vision = "normal") -> float:
    """OKLab distance x 100 of two colours; about 2 is just noticeable side by side."""
    return float(np.linalg.norm(oklab(first, vision) - oklab(second, vision)) * 100.0)


def luminance(color: str) -> float:
    """WCAG relative luminance in [0, 1]."""
    return float(np.dot([0.2126, 0.7152, 0.0722], linear(color)))


def contrast(first: str, second: str) -> float:
    """WCAG contrast ratio of two colours, 1 to 21."""
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def worst_distance(theme: Theme, vision: Vision = "normal") -> tuple[float, str, str]:
    """The two tiers of `theme` that are hardest to tell apart: (distance x 100, name, name)."""
    tiers = PALETTES[theme].tiers
    return min((distance(tiers[a], tiers[b], vision), a, b) for a, b in combinations(tiers, 2))


def blend(color: str, paper: str, share: float) -> str:
    """`color` laid over `paper` with opacity `share` in [0, 1], as #RRGGBB."""
    mixed = [round(share * a + (1.0 - share) * b) for a, b in zip(rgb(color), rgb(paper), strict=True)]
    return "#{:02X}{:02X}{:02X}".format(*mixed)


def css_variables(theme: Theme) -> str:
    """The palette as CSS declarations, one `--qe-name: #RRGGBB;` a line."""
    palette = PALETTES[theme]
    return "\n".join(f"  --qe-{name}: {getattr(palette, name)};" for name in Palette.__dataclass_fields__)
