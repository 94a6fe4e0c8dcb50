"""A link as a QR code, drawn here: a class reads it from the projector, with no network but its own.

Knows text in and SVG out; knows no route and no class.
"""

from __future__ import annotations

import io

import segno

from engine.errors import ConfigError

LINK_CHARS = 300
SCHEMES = ("http://", "https://")


class LinkError(ConfigError):
    """What was asked for is no link that a code could hold."""


def qr_svg(link: str) -> bytes:
    """The link as SVG, dark on white with the quiet zone that readers need, whatever the page's colours are.

    Raises:
        LinkError: not a link, or longer than `LINK_CHARS`.
    """
    if not link.startswith(SCHEMES) or len(link) > LINK_CHARS or any(sign.isspace() for sign in link):
        raise LinkError(f"a code holds a link of at most {LINK_CHARS} characters that begins with http.")
    out = io.BytesIO()
    code = segno.make(link, error="m", micro=False)
    code.save(out, kind="svg", border=4, dark="#000", light="#fff", xmldecl=False, svgns=True, omitsize=True)
    return out.getvalue()
