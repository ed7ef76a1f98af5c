"""Draws the pictures of the documentation, and the logo, as SVG.

`python docs/make_pictures.py` writes them to docs/pictures/; a test fails if they are
out of date.
"""

from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).with_name("pictures")
INK, PALE, BUSY, MOVED, WRONG = "#37474f", "#eceff1", "#26a69a", "#5c6bc0", "#ef6c00"

CELL = 28  # pixels of an element of an array
# In a dark window the ground is dark, and what is drawn on it in ink is light.
DARK = (
    "<style>@media (prefers-color-scheme: dark) {"
    ".ground { fill: #1e2129 }"
    f'[fill="{INK}"] {{ fill: #cfd8dc }} [stroke="{INK}"] {{ stroke: #90a4ae }}'
    f'[fill="{PALE}"] {{ fill: #37414a }} [stroke="{PALE}"] {{ stroke: #37414a }}'
    f'text[fill="{MOVED}"] {{ fill: #9fa8da }}'
    "}</style>"
)


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
        f'fill="{fill}" stroke="{INK}"/>'
    )


def label(x: float, y: float, text: str, anchor: str = "start", fill: str = INK) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}">{text}</text>'
    )


def picture(width: int, height: int, shapes: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="13">'
    )
    ground = f'<rect class="ground" width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head, DARK, ground, *shapes, "</svg>"]) + "\n"


def steps() -> str:
    """Four steps of a grid: copies in, the body, copies out."""
    rows = ("copy in", "body", "copy out")
    left, top, width, height = 80, 30, 90, 34
    shapes = [label(left, 20, "time: one column is one pass of the loop over the grid")]
    for n, name in enumerate(rows):
        y = top + n * (height + 8)
        shapes.append(label(10, y + 22, name))
        columns = (left + column * width for column in range(6))
        shapes += [box(x, y, width - 6, height, PALE) for x in columns]
        fill = BUSY if name == "body" else MOVED
        for step in range(4):
            x = left + (step + n) * width
            shapes.append(box(x, y, width - 6, height, fill))
            text = f"step {step}"
            shapes.append(label(x + 42, y + 22, text, "middle", "white"))
    bottom = top + 3 * (height + 8) + 18
    text = (
        "The longest row decides: copies (bytes / bandwidth) or the body (its units)."
    )
    shapes.append(label(left, bottom, text))
    return picture(640, bottom + 14, shapes)


def tiles() -> str:
    """An array in tiles of 8 x 128, a block of whole ones and one that misses them."""
    left, top, width, height = 20, 40, 96, 30
    shapes = [label(left, 20, "an array of 32 x 512 in tiles of 8 rows x 128 lanes")]
    for row in range(4):
        for column in range(4):
            x, y = left + column * width, top + row * height
            shapes.append(box(x, y, width, height, PALE))
    shapes.append(box(left, top, 2 * width, 2 * height, BUSY))
    shapes.append(label(left + width, top + 34, "(16, 256)", "middle", "white"))
    x, y = left + 2 * width, top + 2 * height
    shapes.append(box(x, y, width, height / 2, WRONG))
    shapes.append(label(x + width / 2, y + 13, "(4, 128)", "middle", "white"))
    right = left + 4 * width + 20
    shapes.append(label(right, top + 34, "whole tiles: copied as they are"))
    shapes.append(label(right, y + 13, "half a tile: the array is cut"))
    shapes.append(label(right, y + 30, "apart before the call"))
    return picture(660, top + 4 * height + 20, shapes)


def units() -> str:
    """One core: memories, and the units that work on them."""
    shapes = [
        box(20, 40, 130, 120, PALE),
        label(85, 65, "main memory", "middle"),
        label(85, 85, "operands, results", "middle"),
        box(250, 40, 150, 70, PALE),
        label(325, 65, "VMEM", "middle"),
        label(325, 85, "blocks, scratch", "middle"),
        box(250, 120, 150, 40, PALE),
        label(325, 145, "SMEM: scalars", "middle"),
        label(200, 70, "copies", "middle", MOVED),
        f'<path d="M150 78 H250 M150 140 H250" stroke="{MOVED}" stroke-width="3"/>',
        f'<path d="M400 75 H470" stroke="{INK}" stroke-width="3"/>',
    ]
    names = ("matrix", "vector", "special", "across lanes", "load, store")
    for n, name in enumerate(names):
        y = 20 + 32 * n
        shapes += [
            box(470, y, 130, 26, BUSY),
            label(535, y + 18, name, "middle", "white"),
        ]
    shapes.append(label(20, 20, "one core; a report names how busy each unit is"))
    return picture(620, 190, shapes)


def cells(x: float, y: float, rows: int, columns: int, fill: str = PALE) -> list[str]:
    """Elements of an array, CELL pixels each."""
    places = [(row, column) for row in range(rows) for column in range(columns)]
    return [box(x + c * CELL, y + r * CELL, CELL, CELL, fill) for r, c in places]


def frame(x: float, y: float, rows: int, columns: int, ink: str = INK) -> str:
    """The border of a block of so many elements."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{columns * CELL}" height="{rows * CELL}" '
        f'fill="none" stroke="{ink}" stroke-width="3"/>'
    )


def grid() -> str:
    """An array of 4 x 6 in blocks of 2 x 2, and the program of each."""
    left, top = 20, 40
    shapes = [label(left, 20, "an array of 4 x 6 in blocks of 2 x 2: a grid of 2 x 3")]
    for i in range(2):
        for j in range(3):
            x, y = left + j * 2 * CELL, top + i * 2 * CELL
            fill = BUSY if (i, j) == (1, 2) else PALE
            shapes += cells(x, y, 2, 2, fill)
            shapes.append(frame(x, y, 2, 2))
            ink = "white" if fill == BUSY else INK
            shapes.append(label(x + CELL, y + CELL + 5, f"({i}, {j})", "middle", ink))
    right = left + 6 * CELL + 24
    lines = (
        "BlockSpec((2, 2), lambda i, j: (i, j))",
        "program (1, 2) sees block (1, 2):",
        "rows 2 and 3, columns 4 and 5",
        "the kernel's ref has shape (2, 2)",
    )
    shapes += [label(right, top + 30 + 26 * n, line) for n, line in enumerate(lines)]
    return picture(520, top + 4 * CELL + 20, shapes)


def edge() -> str:
    """An array of 3 x 5 in blocks of 2 x 2: what is outside."""
    left, top = 20, 40
    shapes = [label(left, 20, "an array of 3 x 5 in blocks of 2 x 2")]
    shapes += cells(left, top, 4, 6, "none") + cells(left, top, 3, 5)
    shapes += [
        frame(left + j * 2 * CELL, top + i * 2 * CELL, 2, 2)
        for i in range(2)
        for j in range(3)
    ]
    x, y = left + 4 * CELL, top + 2 * CELL
    shapes += cells(x, y, 2, 2, WRONG) + cells(x, y, 1, 1, BUSY)
    shapes.append(frame(x, y, 2, 2))
    right = left + 6 * CELL + 24
    lines = (
        ("block (1, 2): one element is inside", BUSY),
        ("three are outside the array:", WRONG),
        ("what is written there is dropped,", INK),
        ("what is read there is fill=, or undefined", INK),
    )
    for n, (line, ink) in enumerate(lines):
        shapes.append(label(right, top + 30 + 26 * n, line, fill=ink))
    return picture(540, top + 4 * CELL + 20, shapes)


def revisits() -> str:
    """Three steps along j: the input's block moves, the output's stays."""
    top, width = 40, 6 * CELL + 70
    shapes = [label(20, 20, "three steps: j moves the input's block, not the output's")]
    for j in range(3):
        left = 20 + j * (width + 20)
        shapes += cells(left, top, 4, 6) + cells(left + 6 * CELL + 20, top, 4, 1)
        shapes += cells(left + j * 2 * CELL, top, 2, 2, BUSY)
        shapes += cells(left + 6 * CELL + 20, top, 2, 1, MOVED)
        shapes.append(frame(left + j * 2 * CELL, top, 2, 2))
        shapes.append(frame(left + 6 * CELL + 20, top, 2, 1))
        text = f"program (0, {j}): " + (
            "o = 0, then o += ..." if j == 0 else "o += ..."
        )
        shapes.append(label(left, top + 4 * CELL + 20, text))
    return picture(3 * (width + 20) + 20, top + 4 * CELL + 36, shapes)


def arrow(x: float, y: float, length: float, ink: str = INK) -> str:
    """From left to right."""
    return (
        f'<path d="M{x:g} {y:g}h{length - 2:g}m-8 -5l8 5l-8 5" fill="none" '
        f'stroke="{ink}" stroke-width="2"/>'
    )


def flash() -> str:
    """The scores of causal attention in blocks: what one program sees, and keeps."""
    left, top, side = 90, 52, 46
    shapes = [
        label(left, 20, "scores of 4 blocks of queries and 4 of keys; causal"),
        label(left, 42, "keys, values: one block after another"),
        label(10, top + 2.5 * side + 5, "queries"),
    ]
    for i in range(4):
        for j in range(4):
            fill = "none" if j > i else (BUSY if (i, j) == (2, 1) else PALE)
            shapes.append(box(left + j * side, top + i * side, side, side, fill))
    y = top + 2.5 * side + 5
    for j, text in enumerate(("done", "now", "next")):
        ink = "white" if j == 1 else INK
        shapes.append(label(left + (j + 0.5) * side, y, text, "middle", ink))
    shapes.append(arrow(left + 4 * side + 8, y - 5, 40))
    right = left + 4 * side + 60
    names = ("m: maximum of each row", "l: sum of exponentials", "acc: sum of values")
    for n, name in enumerate(names):
        shapes.append(box(right, y - 48 + 30 * n, 190, 26, MOVED))
        shapes.append(label(right + 95, y - 30 + 30 * n, name, "middle", "white"))
    shapes.append(label(right, top + 44, "what a program carries along its row:"))
    bottom = top + 4 * side
    text = "Blocks above the diagonal are not computed; no scores reach memory."
    shapes.append(label(left, bottom + 22, text))
    return picture(600, bottom + 36, shapes)


def slots() -> str:
    """Two buffers: one is computed with while the next block is copied to the other."""
    left, top, width, height = 80, 36, 92, 34
    shapes = [label(left, 20, "two buffers; time runs to the right")]
    for slot in range(2):
        y = top + slot * (height + 8)
        shapes.append(label(10, y + 22, f"buffer {slot}"))
        for column in range(6):
            x = left + column * width
            step, computes = divmod(column - slot, 2)
            block = 2 * step + slot
            if not 0 <= block < 5 or column < slot or (computes and block > 4):
                shapes.append(box(x, y, width - 6, height, PALE))
                continue
            shapes.append(box(x, y, width - 6, height, BUSY if computes else MOVED))
            text = f"{'compute' if computes else 'copy'} {block}"
            shapes.append(label(x + 43, y + 22, text, "middle", "white"))
    bottom = top + 2 * (height + 8) + 16
    text = (
        "Each block is waited for just before it is used: a copy hides behind compute."
    )
    shapes.append(label(left, bottom, text))
    return picture(650, bottom + 14, shapes)


def gradients() -> str:
    """A kernel, and the kernel that its derivative is made of."""
    rows = (
        (40, "x", "your kernel", "y", BUSY),
        (110, "dy", "its gradient, a kernel too", "dx", MOVED),
    )
    shapes = [label(20, 20, "jax.grad of a function with a kernel")]
    for y, given, name, result, fill in rows:
        shapes += [
            label(40, y + 28, given, "middle"),
            arrow(60, y + 23, 60),
            box(124, y, 220, 46, fill),
            label(234, y + 28, name, "middle", "white"),
            arrow(348, y + 23, 60),
            label(430, y + 28, result, "middle"),
        ]
    shapes.append(
        f'<path d="M234 86v20m-5 -8l5 8l5 -8" fill="none" stroke="{INK}" '
        'stroke-width="2"/>'
    )
    text = "x; what y was made of is computed again, block by block"
    shapes.append(label(248, 102, text))
    text = (
        "Made from your kernel's grid and blocks; what several programs read is summed."
    )
    shapes.append(label(20, 184, text))
    return picture(640, 200, shapes)


def devices() -> str:
    """A matmul over two devices, as its grid divides it."""
    left, top = 20, 60
    shapes = [label(left, 20, "x @ w in blocks, rows of x on two devices")]
    places = ((left, 4, 3, "x"), (left + 150, 3, 4, "w"), (left + 330, 4, 4, "o"))
    for x, rows, columns, name in places:
        shapes.append(label(x, 48, name))
        for row in range(rows):
            fill = PALE if name == "w" else (BUSY if row < 2 else MOVED)
            y = top + row * CELL
            shapes += cells(x, y, 1, columns, fill)
    shapes += [
        label(left + 108, top + 2 * CELL + 5, "@"),
        arrow(left + 276, top + 2 * CELL, 42),
        label(left + 460, top + CELL + 5, "device 0", fill=BUSY),
        label(left + 460, top + 3 * CELL + 5, "device 1", fill=MOVED),
        label(left + 150, top + 3 * CELL + 22, "whole on both"),
    ]
    text = "Block i of o needs block i of x: no device needs rows of the other."
    shapes.append(label(left, top + 4 * CELL + 40, text))
    return picture(580, top + 4 * CELL + 56, shapes)


def logo() -> str:
    """A slice of a pallasite: crystals of olivine in iron, here on a grid."""
    stone = "M32 3L53 10L61 30L55 51L36 61L14 56L3 37L9 14Z"
    crystals = (
        ("M14 18L27 12L32 24L20 30Z", "#9ccc65"),
        ("M35 11L50 15L52 27L38 26Z", "#c0ca33"),
        ("M9 34L20 34L25 46L13 48Z", "#c0ca33"),
        ("M26 29L38 31L40 43L29 44Z", "#26a69a"),
        ("M44 31L56 31L51 45L44 42Z", "#9ccc65"),
        ("M29 48L43 46L46 52L34 57Z", "#9ccc65"),
    )
    shapes = [f'<path d="{stone}" fill="#78909c"/>']
    shapes += [f'<path d="{path}" fill="{fill}"/>' for path, fill in crystals]
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64">'
    return "\n".join([head, *shapes, "</svg>"]) + "\n"


def pictures() -> dict[str, str]:
    """Every picture, by its file's name."""
    drawn = (steps, tiles, units, grid, edge, revisits)
    drawn += (flash, slots, gradients, devices, logo)
    return {f"{draw.__name__}.svg": draw() for draw in drawn}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / name).write_text(text)
