"""What every picture of the course must be: labels on the card and apart from each other, few bytes, words for it."""

import itertools
import warnings
from collections.abc import Callable
from unittest import mock

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from minfer_lib.learn.style import Picture


def drawn_texts(figure: Picture) -> list[tuple[Text, Bbox]]:
    """Every text that is really drawn, with the box that it takes in pixels."""
    found, draw = [], Text.draw

    def record(text: Text, renderer: object) -> None:
        draw(text, renderer)
        if text.get_visible() and text.get_text().strip():
            found.append((text, text.get_window_extent(renderer)))

    FigureCanvasAgg(figure)
    with mock.patch.object(Text, "draw", record):
        figure.canvas.draw()
    return found


def check_picture(draw: Callable[[], Picture], *, small: bool = True) -> None:
    """Draws it with warnings as errors (a glyph that the font lacks, a layout that failed) and looks at the result."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = draw()
        texts = drawn_texts(figure)
        png = figure.png() if small else b""
    width, height = figure.get_size_inches() * figure.dpi
    for text, box in texts:
        inside = box.x0 >= 3 and box.y0 >= 3 and box.x1 <= width - 3 and box.y1 <= height - 3
        assert "\\math" not in text.get_text(), "a tick label that only a formula could draw"
        assert inside, f"{text.get_text()!r} leaves the card: {box}"
    upright = [(text, box) for text, box in texts if text.get_rotation() in (0, 90)]
    for (a, one), (b, other) in itertools.combinations(upright, 2):
        shared_x = min(one.x1, other.x1) - max(one.x0, other.x0)
        shared_y = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert shared_x < 2 or shared_y < 3, f"{a.get_text()!r} and {b.get_text()!r} overlap"
    assert texts and len(figure.alt) > 10 and repr(figure) == figure.alt
    assert len(png) < 60_000 and width <= 9.6 * figure.dpi


def head(figure: Picture) -> str:
    return figure.texts[0].get_text()


def texts_of(figure: Picture, axis: int = 0) -> list[str]:
    return [text.get_text() for text in figure.axes[axis].texts if text.get_text()]
