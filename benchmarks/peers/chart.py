"""Draws rows as SVG: a group of bars for each, on a scale of its own, shorter is better."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from xml.sax.saxutils import escape

from benchmarks.peers.comparison import LONGEST_S, OURS, Comparison, format_seconds, key_of
from benchmarks.peers.contenders import CONTENDERS

WIDTH, LEFT, BARS = 760, 150, 400  # of the picture, of the names, of the longest bar
LINE, GAP, TOP = 22, 34, 52  # from bar to bar, before a group for its name, before the first group
COLOURS = {OURS: "#0b6e4f"}
OTHER = "#8a94a6"


def draw(title: str, rows: Iterable[Comparison]) -> str:
    """Return a picture of rows. A bar that ends in an arrow stands for what was not reached in `LONGEST_S`."""
    parts: list[str] = []
    y = TOP
    for row in rows:
        parts += _draw_row(row, y)
        y += GAP + LINE * len(row.medians)
    height = y + 12
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="28" font-size="16" font-weight="600" fill="#1c2430">{escape(title)}</text>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def _draw_row(row: Comparison, top: int) -> Iterator[str]:
    titles = {key_of(contender): contender.title for contender in CONTENDERS}
    longest = max(row.medians.values())
    yield f'<text x="16" y="{top + 16}" font-weight="600" fill="#1c2430">{escape(row.name)}</text>'
    for number, (key, seconds) in enumerate(row.medians.items()):
        y = top + GAP - 8 + number * LINE
        width = max(1.0, BARS * seconds / longest)
        colour = COLOURS.get(key, OTHER)
        yield f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end" fill="#1c2430">{escape(titles[key])}</text>'
        yield f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="15" rx="2" fill="{colour}"/>'
        end = LEFT + width
        if seconds >= LONGEST_S:
            yield f'<path d="M{end:.1f} {y} l9 7.5 l-9 7.5 z" fill="{colour}"/>'
            end += 9
        text = f"{format_seconds(seconds)} {row.unit}" + (f" ({note})" if (note := row.unfinished.get(key)) else "")
        yield f'<text x="{end + 6:.1f}" y="{y + 12}" fill="#1c2430">{escape(text)}</text>'
