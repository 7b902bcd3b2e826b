"""Histograms of times as an SVG picture, one row per series, on one logarithmic scale of counts."""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, ROW, LEFT, TOP, BINS = 820, 130, 130, 50, 80
COLORS = ("#2266aa", "#cc6622", "#3a9a5b", "#884499")


def svg(title: str, series: Mapping[str, Sequence[float]]) -> str:
    """The picture; values in milliseconds. All series share the range from the least value to the greatest one."""
    values = [v for s in series.values() for v in s]
    low, high = min(values), max(values)
    width = (high - low) / BINS or 1.0
    height = TOP + ROW * len(series) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for i, (name, gaps) in enumerate(series.items()):
        counts = [0] * BINS
        for gap in gaps:
            counts[min(int((gap - low) / width), BINS - 1)] += 1
        parts += _row(name, counts, TOP + ROW * i, COLORS[i % len(COLORS)])
    for k in range(6):
        x = LEFT + k * (WIDTH - LEFT - 20) / 5
        parts.append(
            f'<text x="{x:.0f}" y="{height - 14}" text-anchor="middle">{low + k * (high - low) / 5:.2f} ms</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _row(name: str, counts: Sequence[int], top: float, color: str) -> list[str]:
    """Bars of one series; a bar ten times as high as another is not ten times as many but counts are written at the axis."""
    tallest = math.log10(1 + max(counts))
    base = top + ROW - 24
    step = (WIDTH - LEFT - 20) / BINS
    out = [
        f'<text x="8" y="{base - 40:.0f}">{escape(name)}</text>',
        f'<text x="{LEFT - 6}" y="{base - 76:.0f}" text-anchor="end" fill="#777">{max(counts)}</text>',
        f'<line x1="{LEFT}" y1="{base:.1f}" x2="{WIDTH - 20}" y2="{base:.1f}" stroke="#999"/>',
    ]
    for i, n in enumerate(counts):
        h = 80 * math.log10(1 + n) / tallest
        if n:
            out.append(
                f'<rect x="{LEFT + i * step:.1f}" y="{base - h:.1f}" width="{step * 0.9:.1f}" height="{h:.1f}" fill="{color}"/>'
            )
    return out
