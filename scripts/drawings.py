"""Three drawings of how it works, as SVG: the pointer list, pages and their ring, and what a step launches.

    PYTHONPATH=. python scripts/drawings.py

Numbers in them are the code's own: a table's words, a plan of visits, and counts of launches that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from experiments.kept import NOTES
from experiments.ladder.counts import LIST
from experiments.lecture.page import Results
from experiments.works.models import FOREACH, FUSED, LOOP
from pagedopt import PagedAdamW
from pagedopt.paging.policy import SLOTS, schedule
from pagedopt.paging.visits import Arrive, Evict, Fetch, Update, plan
from pagedopt.tables.layout import BLOCK, Geometry, HostTable

FOLDER = NOTES / "drawings"
#: Colors that are readable on the white card that each drawing lies on, in a light page and in a dark one.
INK, PALE, BLUE, ORANGE, GREEN = "#24292f", "#d0d7de", "#0969da", "#bc4c00", "#1a7f37"
FILLS = {INK: "#f6f8fa", BLUE: "#ddf4ff", ORANGE: "#fff1e5", GREEN: "#dafbe1"}
WIDTH, LETTER = 900, 13
#: An address as the allocator of a GPU gives them.
FIRST = 0x7F2000000000


class Drawing:
    """Boxes, words and arrows on a white card."""

    def __init__(self, height: int, title: str) -> None:
        self._height, self._title = height, title
        self._parts: list[str] = []

    def words(self, x: float, y: float, text: str, color: str = INK, anchor: str = "start", size: int = LETTER) -> None:
        """A line of text whose base line is at y."""
        style = f'fill="{color}" text-anchor="{anchor}" font-size="{size}"'
        self._parts.append(f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>')

    def code(self, x: float, y: float, lines: Sequence[str]) -> None:
        """Lines of code."""
        for i, line in enumerate(lines):
            place = f'x="{x:g}" y="{y + 17 * i:g}" fill="{INK}" font-size="12"'
            self._parts.append(f'<text {place} font-family="monospace" xml:space="preserve">{escape(line)}</text>')

    def box(self, x: float, y: float, wide: float, high: float, text: str = "", color: str = INK) -> None:
        """A box with a text in its middle."""
        place = f'x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}"'
        self._parts.append(f'<rect {place} rx="3" fill="{FILLS[color]}" stroke="{color}"/>')
        if text:
            self.words(x + wide / 2, y + high / 2 + 4.5, text, anchor="middle")

    def arrow(self, x: float, y: float, to_x: float, to_y: float, color: str = INK) -> None:
        """A line with a head."""
        ends = f'x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}"'
        self._parts.append(f'<line {ends} stroke="{color}" stroke-width="1.5" marker-end="url(#head)"/>')

    def svg(self) -> str:
        """The file."""
        head = '<path d="M0 0 L8 4 L0 8 z" fill="context-stroke"/>'
        size = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
        marker = f'<marker id="head" {size}>{head}</marker>'
        begin = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" width="{WIDTH}" '
            f'height="{self._height}" font-family="sans-serif" role="img">'
        )
        card = f'<rect width="{WIDTH}" height="{self._height}" rx="8" fill="white" stroke="{PALE}"/>'
        lines = [begin, f"<title>{escape(self._title)}</title>", f"<defs>{marker}</defs>", card, *self._parts, "</svg>"]
        return "\n".join(lines) + "\n"


def pointer_list() -> str:
    """The table of a step over three tensors, and what a thread block makes of it."""
    names, numels = ("weight", "bias", "embed"), (6144, 64, 4096)
    lists = ("param", "grad", "exp_avg", "exp_avg_sq")
    table = HostTable(len(lists), numels, len(PagedAdamW.rules[0].scalars), geometry=Geometry(2048, BLOCK))
    addresses = [[FIRST + 0x100000 * i + 0x10000 * j for j in range(len(lists))] for i in range(len(names))]
    table.rows["address"] = addresses
    d = Drawing(450, "A step is one launch over one pointer list")
    d.words(20, 30, "The host writes a table into managed memory; the kernel reads it where it lies.", size=16)
    d.words(20, 62, "a row for each tensor: its address in every list, its number of elements", BLUE)
    left, top, wide = 110, 74, 118
    for j, heading in enumerate((*lists, "elements")):
        d.words(left + wide * j + wide / 2, top + 12, heading, anchor="middle")
    for i, name in enumerate(names):
        y = top + 20 + 30 * i
        d.words(left - 10, y + 19, name, anchor="end")
        for j, address in enumerate(addresses[i]):
            d.box(left + wide * j, y, wide - 4, 26, f"{address:#x}", BLUE)
        d.box(left + wide * 4, y, wide - 4, 26, f"{table.row_words[i, 4]:,}", BLUE)
    d.words(20, 212, "a chunk for each thread block: which row, and from which element on", ORANGE)
    step = 112
    for k, (row, offset) in enumerate(table.chunk_words.tolist()):
        x = left + step * k
        d.box(x, 224, step - 12, 26, f"{names[row]}, {offset:,}", ORANGE)
        d.box(x, 290, step - 12, 34, f"block {k}", GREEN)
        d.arrow(x + step / 2 - 6, 286, x + step / 2 - 6, 254)
    d.words(20, 350, "each block looks up its chunk, then its row", GREEN)
    d.code(left, 376, [
        "auto chunk = table.chunks[blockIdx.x];          // one launch, however many tensors",
        "auto row   = table.rows[chunk.row];",
        "float* param = (float*)row.address[0];          // no copy: these are the tensors' own addresses",
        "param[i] = update(param[i], ((float*)row.address[1])[i], …);",
    ])  # fmt: skip
    return d.svg()


def pages(count: int = 12, resident: int = 5) -> str:
    """One range of addresses, what of it is on the device, and how the rest passes through."""
    moves = schedule([(0, page) for page in range(resident, count)])
    actions = plan((0, 1), [(move, (1 + i, 2 + i)) for i, move in enumerate(moves)])
    d = Drawing(470, "State in pages: some stay on the device, the others pass through a ring of slots")
    d.words(20, 30, "All state is one range of addresses. A budget decides which pages stay on the device.", size=16)
    wide = 860 / count
    for page in range(count):
        color = BLUE if page < resident else ORANGE
        d.box(20 + wide * page, 46, wide - 4, 34, f"page {page}", color)
    d.words(20, 100, "on the device: updated where they are, first", BLUE)
    d.words(20 + wide * resident, 100, "on the host: each visits the device once in a step", ORANGE)
    d.words(20, 140, f"The ring: {SLOTS} slots of device memory, whatever the size of the state.", size=16)
    for slot in range(SLOTS):
        passing = ", ".join(str(move.page) for move in moves if move.slot == slot)
        d.box(20 + 215 * slot, 154, 205, 34, f"slot {slot}: pages {passing}", GREEN)
    d.words(20, 228, "Copies in both directions and updates go on at the same time.", size=16)
    names = {"copy to the device": ORANGE, "update": BLUE, "copy back": GREEN}
    for lane, (name, color) in enumerate(names.items()):
        d.words(20, 264 + 44 * lane, name, color)
    unit, first = 76, 160
    for lane, which, at in timeline(actions):
        text = "resident" if which is None else f"page {which}"
        d.box(first + unit * at, 246 + 44 * lane, unit - 4, 28, text, (ORANGE, BLUE, GREEN)[lane])
    d.arrow(first, 390, first + 9.5 * unit, 390)
    d.words(first + 9.5 * unit, 410, "time", anchor="end")
    d.words(20, 410, "drawn as if each took equally long;")
    d.words(20, 430, "on an H200 the copies take longest, and a step takes what its bytes take on the link")
    d.words(20, 450, "addresses of state never change, wherever a page is")
    return d.svg()


def timeline(actions: Sequence[object]) -> list[tuple[int, int | None, int]]:
    """(lane, page, when) of each action of a plan, as early as it can be, if each takes one unit of time."""
    free, arrived, updated, emptied = [0, 0, 0], dict[int, int](), dict[int, int](), dict[int, int]()
    found: list[tuple[int, int | None, int]] = []
    page: int | None = None

    def take(lane: int, which: int | None, earliest: int) -> int:
        at = max(free[lane], earliest)
        found.append((lane, which, at))
        free[lane] = at + 1
        return at + 1

    for action in actions:
        match action:
            case Fetch(move):
                arrived[move.page] = take(0, move.page, emptied.get(move.slot, 0))
            case Arrive(move):
                page = move.page
            case Update():
                end = take(1, page, 0 if page is None else arrived[page])
                if page is not None:
                    updated[page] = end
            case Evict(move):
                emptied[move.slot] = take(2, move.page, updated[move.page])
    return found


def launches(count: int = 10, more: int = 1000) -> str:
    """What each way of taking a step of AdamW launches, as counted on a GPU."""
    if (counts := Results().rows("optimizer_ladder.counts")) is None:
        raise LookupError("no results of optimizer_ladder.counts are kept")
    d = Drawing(400, "What a step of AdamW launches")
    d.words(20, 30, f"A step of AdamW over {count} tensors. A box is a kernel; the host launches one by one.", size=16)
    ways = {
        LOOP: "a kernel for each operation and tensor",
        FOREACH: "a kernel for each operation",
        FUSED: "one kernel for all operations, and one for step counts",
        LIST: "one kernel",
    }
    for i, (rung, says) in enumerate(ways.items()):
        few, many = (
            counts.number("kernels", what="count", operation="AdamW", rung=rung, count=n, device="cuda")
            for n in (count, more)
        )
        y = 62 + 82 * i
        d.words(20, y, f"{rung}: {says}", (INK, ORANGE, GREEN, BLUE)[i])
        d.words(880, y, f"{few:,.0f}; with {more:,} tensors {many:,.0f}", anchor="end")
        for k in range(round(few or 0)):
            d.box(20 + 10.75 * k, y + 12, 8, 30, "", (INK, ORANGE, GREEN, BLUE)[i])
    d.words(20, 388, "A launch takes the host microseconds, a short kernel less: then the number of boxes is the time.")
    return d.svg()


DRAWINGS = {"pointer_list": pointer_list, "pages": pages, "launches": launches}


def main() -> None:
    """Write all drawings."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        path = FOLDER / f"{name}.svg"
        path.write_text(draw())
        print(f"drawn: {path}")


if __name__ == "__main__":
    main()
