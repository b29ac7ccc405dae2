"""Pictures as text: a few shapes of SVG, and fills that differ without colour too."""

from html import escape

FONT_SIZE = 12
INK, FAINT = "#1b1f24", "#8b949e"

# By Okabe and Ito's palette for all kinds of colour vision; patterns and lightness differ as well.
FILLS = {
    "used": "#0072b2",
    "reserved": "url(#dots)",
    "internal": "url(#stripes)",
    "external": "url(#checks)",
    "free": "#ffffff",
}
SEQUENCE_COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#555555",
)  # fmt: skip

PATTERNS = """<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>
<pattern id="dots" width="5" height="5" patternUnits="userSpaceOnUse">
<rect width="5" height="5" fill="#9fd3f2"/>
<circle cx="2.5" cy="2.5" r="1" fill="#0072b2"/></pattern>
<pattern id="stripes" width="6" height="6" patternUnits="userSpaceOnUse"
patternTransform="rotate(45)"><rect width="6" height="6" fill="#ffd480"/>
<rect width="2" height="6" fill="#b35900"/></pattern>
<pattern id="checks" width="8" height="8" patternUnits="userSpaceOnUse">
<rect width="8" height="8" fill="#e6e8eb"/>
<path d="M0 0L8 8M8 0L0 8" stroke="#5c6470" stroke-width="0.8"/></pattern>
<pattern id="tail" width="4" height="4" patternUnits="userSpaceOnUse"
patternTransform="rotate(45)"><rect width="4" height="4" fill="#ffffff"/>
<rect width="1.2" height="4" fill="#1b1f24"/></pattern>
</defs></svg>"""


def tag(name: str, *content: str, **attributes: object) -> str:
    """An element. In names of attributes `_` stands for `-`, and one at the end for nothing."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{told}>{''.join(content)}</{name}>" if content else f"<{name}{told}/>"


def picture(label: str, width: float, height: float, *content: str) -> str:
    """A picture that is scaled to the room there is; `label` is for those who do not see it."""
    return tag(
        "svg", *content, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label,
        font_size=FONT_SIZE, fill=INK,
    )  # fmt: skip


def text(x: float, y: float, words: str, *, anchor: str = "start", **attributes: object) -> str:
    """Words, with their baseline at `y`."""
    return tag("text", escape(words), x=x, y=y, text_anchor=anchor, **attributes)


def rect(
    x: float, y: float, width: float, height: float, fill: str, *, title: str = "", **more: object
) -> str:
    """A rectangle, with a title that shows when one points at it."""
    content = (tag("title", escape(title)),) if title else ()
    return tag("rect", *content, x=x, y=y, width=width, height=height, fill=fill, **more)


def line(points: list[tuple[float, float]], **attributes: object) -> str:
    """Straight lines from point to point."""
    path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
    return tag("polyline", points=path, **({"fill": "none", "stroke": INK} | attributes))


def legend(names: dict[str, str], *, y: float, width: float) -> tuple[list[str], float]:
    """Swatches with their names (name to fill), wrapped, and the height they take."""
    shapes, x, row = [], 0.0, 0
    for name, fill in names.items():
        room = 26 + 6.6 * len(name)
        if x + room > width:
            x, row = 0.0, row + 1
        top = y + 20 * row
        shapes.append(rect(x, top, 14, 14, fill, stroke=INK, stroke_width=0.6))
        shapes.append(text(x + 18, top + 11.5, name))
        x += room
    return shapes, 20.0 * (row + 1)


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
