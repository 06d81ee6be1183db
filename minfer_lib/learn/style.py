"""How every picture of the course looks: one quiet style, one colour for each engine.

Invariant: a picture brings its own light card, so that it reads the same on a white page, in JupyterLab's dark theme
and in exported HTML: a picture cannot know where it will be seen, and no ink has enough contrast on white and on black
at once. An engine has the same colour and the same marker in every chapter; the colours keep apart for readers with
protanopia, deuteranopia and tritanopia (a test computes that).
"""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Callable, Collection
from typing import Any, ParamSpec

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import FancyBboxPatch
from PIL import Image  # comes with matplotlib

from .quiet import in_notebook as in_notebook

CARD, CARD_EDGE = "#faf9f6", "#dddbd4"
INK, SOFT_INK, FAINT = "#24292f", "#5b626b", "#e4e2dc"
DATA = "#4f7896"  # what belongs to no engine: probabilities, counts
UNUSED = "#d9dce1"  # what is repeated, dropped or reserved but empty
WEIGHTS, KV_CACHE, ACTIVATIONS = "#3d4654", "#4aa3c7", "#d8c26a"
ALERT = "#a11d1b"
GROUP_COLOURS = (DATA, "#b78fa0", ACTIVATIONS, KV_CACHE, "#8fae8b", WEIGHTS)

ENGINE_COLOURS = {
    "yours": INK,
    "fast": "#a11d1b",
    "paged": "#a05ad8",
    "int8": "#d07d19",
    "slots": "#28a468",
    "cached": "#15488a",
    "naive": "#7a8392",
}
ENGINE_MARKERS = {"yours": "X", "fast": "*", "paged": "D", "int8": "^", "slots": "s", "cached": "o", "naive": "v"}
PART_COLOURS = {  # of what takes memory or is moved, in the order in which it is stacked
    "weights": WEIGHTS, "layers": WEIGHTS, "int8 weights": ENGINE_COLOURS["int8"],
    "int8 layers": ENGINE_COLOURS["int8"], "embedding": DATA, "head": "#8fae8b", "KV cache": KV_CACHE,
    "activations": ACTIVATIONS, "fp copy written": "#b78fa0", "fp copy read": "#d3bac5",
    "read blocks": KV_CACHE, "write copy": "#b78fa0", "read copy": "#d3bac5",
}  # fmt: skip
PEER_FILL, PEER_MARKER = "#ffffff", "P"

SCREEN_DPI = 96  # CSS pixels per inch: a figure 7 inches wide takes 672 pixels of the page
SHARPNESS = 2.0  # pixels of the picture for each of them, for screens of high resolution

STYLE: dict[str, Any] = {
    "figure.dpi": SCREEN_DPI,
    "figure.facecolor": "none",
    "figure.figsize": (7.0, 3.2),
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.08,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that pictures are the same everywhere
    "font.size": 10.0,
    "text.color": INK,
    "text.parse_math": False,  # a token may be a dollar sign
    "axes.facecolor": "none",
    "axes.edgecolor": SOFT_INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "axes.prop_cycle": mpl.cycler(color=[ENGINE_COLOURS[e] for e in ("cached", "int8", "slots", "paged", "fast")]),
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    **dict.fromkeys(("xtick.color", "ytick.color"), SOFT_INK),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), INK),
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.borderpad": 0.1,
    "legend.borderaxespad": 0.7,
    "lines.linewidth": 2.0,
    "savefig.facecolor": "none",
}

P = ParamSpec("P")


class Picture(Figure):
    """A matplotlib figure that a notebook shows once, sharp, on its card, and that says in words what it shows.

    It is made without pyplot: pyplot would draw it a second time at the end of the cell. `alt` is the text that
    stands for the picture in a terminal and in the notebook's file.
    """

    alt: str = ""

    def png(self, *, compact: bool = True) -> bytes:
        """The picture as a PNG file whose bytes depend on nothing but what is drawn; not `compact`: larger, sooner."""
        buffer = io.BytesIO()
        with mpl.rc_context(STYLE):
            self.savefig(buffer, format="png", dpi=SCREEN_DPI * SHARPNESS, metadata={"Software": None})
        return smaller_png(buffer.getvalue()) if compact else buffer.getvalue()

    def _ipython_display_(self) -> None:
        from IPython.display import display

        # not by a `_repr_...` method: once pyplot is imported, IPython has its own way with figures, which crops them
        data, metadata = png_bundle(self.png(), repr(self))
        display(data, metadata=metadata, raw=True)

    def __repr__(self) -> str:
        return self.alt or "(a figure)"


def png_bundle(png: bytes, alt: str) -> tuple[dict[str, str], dict[str, Any]]:
    """What IPython needs to display a PNG of ours: data by type, and the size at which to show it (CSS pixels)."""
    width, height = Image.open(io.BytesIO(png)).size
    size = {"width": round(width / SHARPNESS), "height": round(height / SHARPNESS)}
    return {"image/png": base64.b64encode(png).decode(), "text/plain": alt}, {"image/png": size}


def smaller_png(png: bytes) -> bytes:
    """The same picture with its 256 most frequent colours: flat fills stay exact, soft edges move by a hair.

    A third of the bytes, which is what lets a chapter with twenty pictures stay under a megabyte.
    """
    image = Image.open(io.BytesIO(png)).convert("RGBA")
    pixels = np.asarray(image).reshape(-1, 4)
    colours, inverse, counts = np.unique(pixels.view(np.uint32).ravel(), return_inverse=True, return_counts=True)
    frequent = np.argsort(-counts, kind="stable")[:256]
    as_rgba = colours.view(np.uint8).reshape(-1, 4).astype(np.float32)  # [colours, 4]
    squares = (as_rgba**2).sum(1)
    distance = squares[:, None] - 2 * as_rgba @ as_rgba[frequent].T + squares[frequent]  # [colours, 256]
    nearest = distance.argmin(1).astype(np.uint8)
    result = Image.fromarray(nearest[inverse].reshape(image.size[::-1]), "P")
    result.putpalette(as_rgba[frequent].astype(np.uint8).tobytes(), "RGBA")
    buffer = io.BytesIO()
    result.save(buffer, "png", optimize=True)
    return buffer.getvalue()


def canvas(
    width: float = 7.0, height: float = 3.2, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Picture, Any]:
    """A `Picture` of that size in inches and its axes (one, or an array as `Figure.subplots` returns it)."""
    figure = Picture(figsize=(width, height))
    card = FancyBboxPatch(
        (0.04, 0.04), width - 0.08, height - 0.08, boxstyle="round,pad=0,rounding_size=0.09",
        transform=figure.dpi_scale_trans, facecolor=CARD, edgecolor=CARD_EDGE, linewidth=0.8, zorder=-100,
    )  # fmt: skip
    card.set_in_layout(False)
    figure.add_artist(card)
    return figure, figure.subplots(rows, columns, **options)


def headline(figure: Picture, text: str | None) -> None:
    """What the picture says, in its upper left corner (None or "": nothing)."""
    if text:
        width, height = figure.get_size_inches()
        title = figure.text(0.18 / width, 1 - 0.15 / height, text, ha="left", va="top", size=11.5)
        title.set_in_layout(False)
        if isinstance(layout := figure.get_layout_engine(), ConstrainedLayoutEngine):
            layout.set(rect=(0, 0, 1, 1 - 0.36 / height))  # the rest of the picture stays below


def drawing(function: Callable[P, Picture]) -> Callable[P, Picture]:
    """Decorator of a function that draws: inside it the course's style holds, outside nothing changes."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Picture:
        with mpl.rc_context(STYLE):
            return function(*args, **kwargs)

    return wrapped


def use_style() -> None:
    """Give the reader's own matplotlib figures the style of the course, card included (its corners stay square)."""
    mpl.rcParams.update(STYLE)
    mpl.rcParams.update({"figure.facecolor": CARD, "savefig.facecolor": CARD, "figure.edgecolor": CARD_EDGE})


def engine_family(engine: object) -> str | None:
    """Which rung of the ladder an engine or its label belongs to: "naive", "cached" ..., or None for a peer.

    A label may say more than its rung ("cached (hf)", "paged + int8"): the latest rung that it names counts. "yours" is
    the reader's own engine, whatever else its label says.
    """
    label = str(getattr(engine, "name", engine)).lower()
    if label.startswith(("hf", "transformers", "vllm", "llama.cpp")):
        return None
    return next((family for family in ENGINE_COLOURS if family in label), None)


def colour_of(engine: object) -> str:
    """The colour of an engine (its label, or the engine itself); white for peers, which get a black outline."""
    family = engine_family(engine)
    return PEER_FILL if family is None else ENGINE_COLOURS[family]


def marker_of(engine: object) -> str:
    """The marker of an engine in scatter and line plots."""
    family = engine_family(engine)
    return PEER_MARKER if family is None else ENGINE_MARKERS[family]


def bar_style(engine: object) -> dict[str, Any]:
    """Keywords of `Axes.bar` and `barh` for an engine's bar: its colour; black hatching for the reader's own engine
    ("yours ..."), a black outline for a peer's."""
    family = engine_family(engine)
    outlined = {"color": PEER_FILL, "edgecolor": INK, "linewidth": 1.2}
    if family == "yours":
        return outlined | {"hatch": "////"}
    return outlined if family is None else {"color": ENGINE_COLOURS[family], "edgecolor": "none", "linewidth": 0.0}


def line_style(engine: object) -> dict[str, Any]:
    """Keywords of `Axes.plot` for an engine's line with markers."""
    peer = engine_family(engine) is None
    colour = INK if peer else colour_of(engine)
    return {
        "color": colour, "marker": marker_of(engine), "markersize": 6,
        "markerfacecolor": PEER_FILL if peer else colour, "markeredgecolor": colour,
    }  # fmt: skip


def quiet(ax: Axes, *, grid: str | None = None, spines: Collection[str] = ("left", "bottom")) -> None:
    """Only the lines that carry something: a faint grid along one axis ("x" or "y"), and the named spines."""
    if grid:
        ax.grid(axis=grid)
    for side, spine in ax.spines.items():
        spine.set_visible(side in spines)


def format_bytes(count: float) -> str:
    """Bytes as a reader says them, in powers of 1,024: 512 B, 45.0 KiB, 1.00 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    digits = 0 if unit == "B" or abs(count) >= 100 else 1 if abs(count) >= 10 else 2
    return f"{count:.{digits}f} {unit}"


def on_colour(colour: str) -> str:
    """Ink for text on a fill: dark on light fills, white on dark ones."""
    red, green, blue = mpl.colors.to_rgb(colour)
    return INK if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > 0.25 else "#ffffff"


def darker(colour: str, share: float = 0.45) -> str:
    """A colour mixed with ink, for text beside a line that is too light to read as text."""
    mixed = (1 - share) * np.array(mpl.colors.to_rgb(colour)) + share * np.array(mpl.colors.to_rgb(INK))
    return mpl.colors.to_hex(mixed)
