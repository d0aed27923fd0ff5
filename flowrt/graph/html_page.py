"""Draws a graph as one HTML file that needs nothing else: no network, no program to draw, no script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from flowrt.graph.diagrams import DrawnEdge, clusters, drawn_edges
from flowrt.graph.model import Graph, role_of

_WIDTH, _BETWEEN, _LINE, _MARGIN = 210, 130, 17, 12  # of boxes, between columns, of a line of text, around all; in pixels
_STYLE = """
:root { color-scheme: light dark; --line: #8b949e; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 16px; }
.wide { overflow-x: auto; }
rect { fill: canvas; stroke: var(--line); }
text { fill: currentColor; font-size: 12px; }
text.name { font-weight: 600; }
path { fill: none; stroke-width: 1.5; stroke: var(--line); }
path:hover { stroke-width: 4; }
table { border-collapse: collapse; margin-top: 16px; }
th, td { text-align: left; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line); }
"""


@dataclass(frozen=True)
class _Box:
    """A process with its nodes, or a role."""

    name: str
    lines: tuple[str, ...]
    x: int
    y: int

    @property
    def height(self) -> int:
        return _LINE * (len(self.lines) + 1) + _MARGIN

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


def to_html(graph: Graph, title: str) -> str:
    """A page with a picture of processes, nodes and the edges between processes, and a table of all edges."""
    boxes, box_of = _place(graph)
    edges = list(drawn_edges(graph))
    width = max(box.x + _WIDTH for box in boxes) + _MARGIN
    height = max(box.y + box.height for box in boxes) + _MARGIN
    picture = [*_draw_lines(edges, box_of), *(line for box in boxes for line in _draw_box(box))]
    rows = [f"<tr><td>{escape(each.source)}</td><td>{escape(each.target)}</td><td>{escape(each.label)}</td></tr>" for each in edges]
    name = escape(title)
    head = f'<meta charset="utf-8"/><meta name="viewport" content="width=device-width"/><title>{name}</title><style>{_STYLE}</style>'
    return "\n".join(
        [
            f'<!doctype html>\n<html lang="en"><head>{head}</head><body>',
            f'<h1>{name}</h1><div class="wide">',
            f'<svg width="{width}" height="{height}" role="img" aria-label="processes of {name}">',
            *picture,
            '</svg></div><div class="wide"><table><tr><th>from</th><th>to</th><th>edge</th></tr>',
            *rows,
            "</table></div></body></html>\n",
        ]
    )


def _place(graph: Graph) -> tuple[list[_Box], dict[str, _Box]]:
    """The boxes in columns by role, and the box of each name that edges have."""
    boxes, box_of, columns, bottoms = list[_Box](), dict[str, _Box](), dict[str, int](), dict[str, int]()
    for process, nodes in clusters(graph).items():
        parts = [(process, nodes)] if process else [(name, {name: lines}) for name, lines in nodes.items()]
        for name, held in parts:
            role = role_of(name if process else name.partition("-")[0])
            column = columns.setdefault(role, len(columns))
            lines = tuple(", ".join(label) for label in held.values()) if process else tuple(held[name][1:])
            box = _Box(name, lines, _MARGIN + column * (_WIDTH + _BETWEEN), bottoms.get(role, _MARGIN))
            bottoms[role] = box.y + box.height + _MARGIN
            boxes.append(box)
            box_of |= dict.fromkeys(held, box)
    return boxes, box_of


def _draw_box(box: _Box) -> Iterator[str]:
    yield f'<rect x="{box.x}" y="{box.y}" width="{_WIDTH}" height="{box.height}" rx="6"/>'
    for number, line in enumerate((box.name, *box.lines)):
        style = ' class="name"' if not number else ""
        yield f'<text{style} x="{box.x + _MARGIN}" y="{box.y + _LINE * (number + 1)}">{escape(line)}</text>'


def _draw_lines(edges: list[DrawnEdge], box_of: dict[str, _Box]) -> Iterator[str]:
    """One line between two boxes for all edges both ways."""
    found: dict[tuple[str, str], list[DrawnEdge]] = {}
    for edge in edges:
        ends = tuple(sorted((box_of[edge.source].name, box_of[edge.target].name)))
        if ends[0] != ends[1]:
            found.setdefault((ends[0], ends[1]), []).append(edge)
    for same in found.values():
        left, right = sorted((box_of[same[0].source], box_of[same[0].target]), key=lambda box: box.x)
        start = left.x + _WIDTH
        end, bend = (right.x, _BETWEEN / 2) if right.x > left.x else (start, _BETWEEN / 4)
        away = end - bend if right.x > left.x else end + bend
        colour = f' style="stroke: {same[0].colour}"' if same[0].colour else ""
        text = escape("\n".join(f"{edge.source} to {edge.target}: {edge.label}" for edge in same))
        curve = f"M{start} {left.middle}C{start + bend} {left.middle} {away} {right.middle} {end} {right.middle}"
        yield f'<path d="{curve}"{colour}><title>{text}</title></path>'
