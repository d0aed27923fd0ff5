"""A graph as an SVG picture, in plain Python: no drawing program is needed. Called by `flowrt graph show --svg`.

Here: the layout (each process a column of its nodes, processes in columns by who feeds whom) and the SVG text. Not here: what the words
are (diagrams.py). Messages between processes are drawn from side to side; inside a process, down the column, and around it where an
edge skips nodes or goes back up to the next layer or step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

from flowrt.graph.diagrams import Arrow, arrows, boxes, collapsed_words, is_collapsed, node_words
from flowrt.graph.model import GATEWAY, Graph

_FONT = "font-family='system-ui, sans-serif'"
_LETTER, _LINE = 6.6, 15.0  # width of a letter, height of a line, at 11 px
_SLOT = 13.0  # between two lines at one side of a node
_NODE_GAP, _BOX_GAP, _PADDING, _MARGIN = 16.0, 26.0, 16.0, 20.0
_MEETING = 9.0  # between two arcs at one node
_ARC = 14.0  # how much farther out each further arc lies
_STYLE = """
  .box { fill: #f4f6f8; stroke: #8a97a5; }
  .node { fill: #ffffff; stroke: #33475b; }
  .cross { fill: none; stroke: #b5502c; stroke-width: 1.4; }
  .local { fill: none; stroke: #33475b; }
  .advance { fill: none; stroke: #2d6fb3; stroke-dasharray: 4 3; }
  .title { font-size: 12px; font-weight: 600; fill: #33475b; }
  .word { font-size: 11px; fill: #1c2733; }
  .label { font-size: 9px; fill: #4a5a6a; }
  .halo { font-size: 9px; fill: #ffffff; stroke: #ffffff; stroke-width: 3px; }
"""


@dataclass
class _Item:
    """A node (or, in a collapsed drawing, a process): its words and its place."""

    words: list[str]
    left: list[Arrow] = field(default_factory=list)  # cross lines that meet its left side, top to bottom
    right: list[Arrow] = field(default_factory=list)
    arcs: list[Arrow] = field(default_factory=list)  # lines within the process that go around
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0


@dataclass
class _Box:
    """A process: its items from top to bottom, room for arcs at its left, its column and place."""

    title: str
    items: dict[str, _Item]
    column: int = 0
    around: list[Arrow] = field(default_factory=list)  # its arcs, from the inside out
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0


def to_svg(graph: Graph, title: str = "") -> str:
    """The whole picture; the size depends on the graph."""
    lines = arrows(graph)
    columns = _columns(_boxes(graph), lines)
    by_item = {key: box for column in columns for box in column for key in box.items}
    _sides(lines, by_item)
    for column in columns:
        for box in column:
            _measure(box, [line for line in lines if line.source in box.items and line.target in box.items])
    detours: dict[Arrow, float] = {}
    width, height = _place(columns, lines, detours)
    drawn = [_draw_box(box) for column in columns for box in column]
    crossing = [line for line in lines if by_item[line.source] is not by_item[line.target]]
    drawn += [_draw_cross(line, by_item, detours.get(line)) for line in crossing]
    drawn += [_draw_local(box, lines) for column in columns for box in column]
    drawn += [_draw_items(box) for column in columns for box in column]
    head = f'<text x="{_MARGIN}" y="{_MARGIN}" class="title">{escape(title)}</text>' if title else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" {_FONT}>'
        f"<title>{escape(title or 'graph')}</title><style>{_STYLE}</style>{_MARKERS}"
        f'<rect width="100%" height="100%" fill="#ffffff"/>{head}' + "\n".join(part for part in drawn if part) + "</svg>\n"
    )


_MARKERS = "<defs>" + "".join(
    f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    f'<path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
    for name, color in (("cross", "#b5502c"), ("local", "#33475b"), ("advance", "#2d6fb3"))
) + "</defs>"  # fmt: skip


def _boxes(graph: Graph) -> list[_Box]:
    """The input stands before everything and the output behind, though both lie in the gateway's process."""
    found = []
    for process, nodes in boxes(graph):
        if is_collapsed(graph):
            found.append(_Box("", {process: _Item(collapsed_words(process, nodes))}))
        elif process == GATEWAY:
            found += [_Box(GATEWAY, {node.name: _Item(node_words(node))}) for node in nodes]
        else:
            found.append(_Box(process, {node.name: _Item(node_words(node)) for node in nodes}))
    return found


def _columns(found: list[_Box], lines: list[Arrow]) -> list[list[_Box]]:
    """Boxes by the longest way to them; a line that goes back to a box mentioned earlier does not count."""
    order = sorted(found, key=lambda box: {"input": 0, "output": 2}.get(next(iter(box.items)), 1))
    number = {key: index for index, box in enumerate(order) for key in box.items}
    for index, box in enumerate(order):
        before = [number[line.source] for line in lines if line.crosses and line.target in box.items and number[line.source] < index]
        box.column = max((order[other].column + 1 for other in before), default=0)
    columns: list[list[_Box]] = [[] for _ in range(max(box.column for box in order) + 1)]
    for box in order:
        columns[box.column].append(box)
    return columns


def _sides(lines: list[Arrow], by_item: dict[str, _Box]) -> None:
    """Which side of its two nodes a line between processes meets."""
    for line in lines:
        source, target = by_item[line.source], by_item[line.target]
        if source is target:
            continue
        onward = source.column < target.column
        source_item, target_item = source.items[line.source], target.items[line.target]
        (source_item.right if onward or source.column == target.column else source_item.left).append(line)
        (target_item.left if onward else target_item.right).append(line)


def _measure(box: _Box, inside: list[Arrow]) -> None:
    order = {key: index for index, key in enumerate(box.items)}
    around = [line for line in inside if order[line.target] - order[line.source] != 1]
    box.around = sorted(around, key=lambda line: (abs(order[line.target] - order[line.source]), order[line.source]))
    for line in box.around:
        for key in {line.source, line.target}:
            box.items[key].arcs.append(line)
    inner = max(max(len(word) for word in item.words) for item in box.items.values()) * _LETTER + 18
    top = _PADDING + (16 if box.title else 0)
    for item in box.items.values():
        item.width = max(inner, 76.0)
        met = max(max(len(item.left), len(item.right)) * _SLOT, len(item.arcs) * _MEETING)
        item.height = max(len(item.words) * _LINE + 10, met + 8)
        item.y = top
        top += item.height + _NODE_GAP
    room = (len(box.around) + 1) * _ARC if box.around else 0.0
    box.width = max(room + max(inner, 76.0) + 2 * _PADDING, len(box.title) * 7.5 + 2 * _PADDING)
    box.height = top - _NODE_GAP + _PADDING
    for item in box.items.values():
        item.x = box.width - _PADDING - item.width


def _place(columns: list[list[_Box]], lines: list[Arrow], detours: dict[Arrow, float]) -> tuple[float, float]:
    """Gives every box and item its place, and lines that skip a column a height below all boxes; returns the size of the picture."""
    heights = [sum(box.height for box in column) + _BOX_GAP * (len(column) - 1) for column in columns]
    x, total = _MARGIN, max(heights)
    words = max((len(_words(line)) for line in lines if line.crosses), default=0)
    gap = max(110.0, words * 5.0 + 110)
    for column, height in zip(columns, heights, strict=True):
        y = _MARGIN + 14 + (total - height) / 2
        for box in column:
            box.x, box.y = x, y
            for item in box.items.values():
                item.x, item.y = item.x + box.x, item.y + box.y
            y += box.height + _BOX_GAP
        x += max(box.width for box in column) + gap
    for column in columns:  # lines meet a side in the order of where they come from, so that they cross little
        for box in column:
            for item in box.items.values():
                item.left.sort(key=lambda line, own=item: _other_end(line, own, columns))  # type: ignore[misc]
                item.right.sort(key=lambda line, own=item: _other_end(line, own, columns))  # type: ignore[misc]
    skipping = [line for line in lines if line.crosses and abs(_column(columns, line.source) - _column(columns, line.target)) > 1]
    bottom = _MARGIN + 14 + total
    for index, line in enumerate(skipping):
        detours[line] = bottom + (index + 1) * _SLOT
    return x - gap + _MARGIN, bottom + len(skipping) * _SLOT + _MARGIN


def _column(columns: list[list[_Box]], key: str) -> int:
    return next(index for index, column in enumerate(columns) if any(key in box.items for box in column))


def _other_end(line: Arrow, own: _Item, columns: list[list[_Box]]) -> tuple[float, float]:
    items = {key: item for column in columns for box in column for key, item in box.items.items()}
    source, target = items[line.source], items[line.target]
    other = target if source is own else source
    return other.y, other.x


def _words(line: Arrow) -> str:
    return ", ".join(line.words)


def _slot(item: _Item, line: Arrow) -> tuple[float, float, int]:
    """Where on the side of `item` the line ends, and which way is out of it (-1 left, 1 right)."""
    side, x, out = (item.left, item.x, -1) if line in item.left else (item.right, item.x + item.width, 1)
    return x, item.y + item.height * (side.index(line) + 1) / (len(side) + 1), out


def _draw_cross(line: Arrow, by_item: dict[str, _Box], detour: float | None) -> str:
    x1, y1, out1 = _slot(by_item[line.source].items[line.source], line)
    x2, y2, out2 = _slot(by_item[line.target].items[line.target], line)
    bend = max(40.0, abs(x2 - x1) * 0.45)
    path = f"M{x1:.1f} {y1:.1f}C{x1 + out1 * bend:.1f} {y1:.1f} {x2 + out2 * bend:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
    if detour is not None:
        xa, xb = x1 + out1 * 90, x2 + out2 * 90
        path = f"M{x1:.1f} {y1:.1f}C{x1 + out1 * 60:.1f} {y1:.1f} {xa - out1 * 60:.1f} {detour:.1f} {xa:.1f} {detour:.1f}"
        path += f"H{xb:.1f}C{xb - out2 * 60:.1f} {detour:.1f} {x2 + out2 * 60:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
    x, y, anchor = (x2 - 10, y2 - 3, "end") if out2 < 0 else (x1 - 10, y1 - 3, "end")
    if out1 > 0 and out2 > 0:
        x, y, anchor = x1 + 8, y1 - 3, "start"
    return f'<path class="cross" marker-end="url(#cross)" d="{path}"/>' + _label(x, y, anchor, _words(line))


def _draw_local(box: _Box, lines: list[Arrow]) -> str:
    drawn = []
    for line in lines:
        if line in box.around or line.source not in box.items or line.target not in box.items:
            continue
        source, target = box.items[line.source], box.items[line.target]
        x = source.x + source.width / 2
        kind = "advance" if line.advances else "local"
        d = f"M{x:.1f} {source.y + source.height:.1f}L{x:.1f} {target.y:.1f}"
        drawn.append(f'<path class="{kind}" marker-end="url(#{kind})" d="{d}"/>')
        drawn.append(_label(x + 7, target.y - 4, "start", _words(line)))
    for index, line in enumerate(box.around):
        source, target = box.items[line.source], box.items[line.target]
        y1, y2 = _meeting(source, line), _meeting(target, line)
        if source is target:
            y1, y2 = y1 - 4, y2 + 4
        x = source.x - (index + 1) * _ARC
        way = 5 if y2 > y1 else -5
        kind = "advance" if line.advances else "local"
        d = f"M{source.x:.1f} {y1:.1f}H{x + 5:.1f}Q{x:.1f} {y1:.1f} {x:.1f} {y1 + way:.1f}"
        d += f"V{y2 - way:.1f}Q{x:.1f} {y2:.1f} {x + 5:.1f} {y2:.1f}H{target.x:.1f}"
        drawn.append(f'<path class="{kind}" marker-end="url(#{kind})" d="{d}"/>')
        drawn.append(_label(x - 3, (y1 + y2) / 2, "middle", _words(line), turned=True))
    return "".join(drawn)


def _meeting(item: _Item, line: Arrow) -> float:
    return item.y + item.height * (item.arcs.index(line) + 1) / (len(item.arcs) + 1)


def _draw_box(box: _Box) -> str:
    if not box.title:
        return ""
    title = f'<text x="{box.x + 10:.1f}" y="{box.y + 18:.1f}" class="title">{escape(box.title)}</text>'
    return f'<rect class="box" rx="8" x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}"/>{title}'


def _draw_items(box: _Box) -> str:
    drawn = []
    for key, item in box.items.items():
        name = quoteattr(key)
        drawn.append(f'<rect class="node" rx="4" data-name={name} x="{item.x:.1f}" y="{item.y:.1f}"')
        drawn.append(f' width="{item.width:.1f}" height="{item.height:.1f}"/>')
        top = item.y + (item.height - len(item.words) * _LINE) / 2 + 11.5
        for index, word in enumerate(item.words):
            x, y = item.x + item.width / 2, top + index * _LINE
            drawn.append(f'<text x="{x:.1f}" y="{y:.1f}" class="word" text-anchor="middle">{escape(word)}</text>')
    return "".join(drawn)


def _label(x: float, y: float, anchor: str, text: str, turned: bool = False) -> str:
    """Small words with a white edge, so that lines behind them do not cut through; `turned` ones run upwards."""
    if not text:
        return ""
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    rest = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{escape(text)}</text>'
    return ("" if turned else f'<text class="halo" {rest}') + f'<text class="label" {rest}'
