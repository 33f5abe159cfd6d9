"""Drawn pictures of shapes, and questions about them: how many, of which colour, where. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

CELL, ACROSS = 16, 2  # pixels of a cell's side, and cells of a picture's
SHAPES, COLOURS = (
    ("square", "circle", "triangle"),
    {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 230)},
)
PLACES = ("northwest", "northeast", "southwest", "southeast")
NUMBERS = ("one", "two", "three", "four")
WORDS = ("how", "many", "what", "colour", "shape", "where", "?", *SHAPES, *COLOURS, *NUMBERS, *PLACES)


@dataclass(frozen=True)
class Question:
    """A picture of some shapes, all alike, in cells of their own; a question about it; the answer."""

    shape: str
    colour: str
    cells: tuple[int, ...]
    text: str
    answer: str
    seed: int  # of where in its cell a shape stands, how large it is, and the noise

    @property
    def id(self) -> str:
        where = "".join(map(str, self.cells))
        return f"{self.colour}-{self.shape}-{where}-{self.seed}/{self.text.replace(' ', '-')}"

    def picture(self) -> np.ndarray:
        """[H, W, 3] uint8."""
        rng = np.random.default_rng(self.seed)
        canvas = Image.new("RGB", (CELL * ACROSS, CELL * ACROSS), (235, 235, 235))
        pen = ImageDraw.Draw(canvas)
        colour = COLOURS[self.colour]
        for cell in self.cells:
            size, dx, dy = int(rng.integers(8, 13)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
            x, y = cell % ACROSS * CELL + dx, cell // ACROSS * CELL + dy
            box = (x, y, x + size - 1, y + size - 1)
            if self.shape == "square":
                pen.rectangle(box, fill=colour)
            elif self.shape == "circle":
                pen.ellipse(box, fill=colour)
            else:
                pen.polygon([(x, y + size - 1), (x + size - 1, y + size - 1), (x + size // 2, y)], fill=colour)
        noise = rng.integers(-12, 13, (CELL * ACROSS, CELL * ACROSS, 3))
        return np.clip(np.asarray(canvas).astype(np.int64) + noise, 0, 255).astype(np.uint8)


def questions(rng: np.random.Generator) -> Iterator[Question]:
    """Without end: each kind of question as often, and each answer of a kind."""
    names = tuple(COLOURS)
    while True:
        kind, shape, colour = (int(rng.integers(count)) for count in (4, 3, 3))
        count = 1 if kind == 3 else int(rng.integers(1, 5))
        cells = tuple(sorted(rng.permutation(4)[:count].tolist()))
        text, answer = (
            ("how many ?", NUMBERS[count - 1]), ("what colour ?", names[colour]), ("what shape ?", SHAPES[shape]),
            ("where ?", PLACES[cells[0]]),
        )[kind]  # fmt: skip
        yield Question(SHAPES[shape], names[colour], cells, text, answer, int(rng.integers(2**31)))
