"""`explore(draw, ...)`: a figure that follows sliders, and for readers without a kernel a picture of a few positions.

Invariant: what a reader needs is in the picture, which needs no kernel: it is all that is seen on the web, in exported
HTML and where ipywidgets is missing. Widget and picture are two forms of one output, so that a front end shows one of
them. The widget holds one image that is replaced, never an output area that grows, and a value that cannot be drawn is
reported in its place. A control ends where the others make it end: no position of it shows the same as another.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidParameter
from .quiet import in_notebook
from .style import CARD, CARD_EDGE, INK, SCREEN_DPI, SHARPNESS, Picture, png_bundle, smaller_png

Draw = Callable[..., Picture]
PAGE_WIDTH = 9.6  # inches that an output area has at least room for


@dataclass(frozen=True)
class Slider:
    """A control for numbers from `low` to `high` in steps of `step`; `value` is where it begins.

    high: a number, or a function of the values of all controls (by name). With `play` there is a button beside it that
    moves it on by itself.
    """

    low: float
    high: float | Callable[..., float]
    step: float
    value: float
    label: str = ""
    play: bool = False

    def widget(self, name: str, values: Mapping[str, Any]) -> Any:
        import ipywidgets

        high = self.high(**values) if callable(self.high) else self.high
        whole = all(float(x).is_integer() for x in (self.low, high, self.step, self.value))
        kind, number = (ipywidgets.IntSlider, int) if whole else (ipywidgets.FloatSlider, float)
        return kind(
            value=number(self.value), min=number(self.low), max=number(high), step=number(self.step),
            description=self.label or name, **_look(ipywidgets),
        )  # fmt: skip

    def fit(self, widget: Any, values: Mapping[str, Any]) -> None:
        if callable(self.high):
            widget.max = self.high(**values)  # a value beyond it moves there

    def text(self, value: Any) -> str:
        return f"{value:g}"


@dataclass(frozen=True)
class Choice:
    """A control for one of `options`, as a slider over them (in order) or, with `menu`, as a drop-down list.

    options: a sequence, or a function of the values of all controls (by name).
    """

    options: Sequence[Any] | Callable[..., Sequence[Any]]
    value: Any
    label: str = ""
    menu: bool = False

    def _named(self, values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        options = self.options(**values) if callable(self.options) else self.options
        return tuple((self.text(option), option) for option in options)

    def widget(self, name: str, values: Mapping[str, Any]) -> Any:
        import ipywidgets

        kind = ipywidgets.Dropdown if self.menu else ipywidgets.SelectionSlider
        return kind(options=self._named(values), value=self.value, description=self.label or name, **_look(ipywidgets))

    def fit(self, widget: Any, values: Mapping[str, Any]) -> None:
        named = self._named(values)
        if named != tuple(widget.options):
            there, value = [option for _, option in named], widget.value
            widget.options = named
            widget.value = value if value in there else there[-1]

    def text(self, value: Any) -> str:
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _look(ipywidgets: Any) -> dict[str, Any]:
    return {"layout": ipywidgets.Layout(width="480px"), "style": {"description_width": "150px"}}


@dataclass(frozen=True)
class Gallery:
    """Several pictures on one card, each with a line that says how the controls stand."""

    pictures: tuple[Picture, ...]
    captions: tuple[str, ...]

    @property
    def alt(self) -> str:
        told = zip(self.captions, self.pictures, strict=True)
        return "\n".join(f"{caption}: {picture!r}" for caption, picture in told)

    def png(self) -> bytes:
        """One PNG: as many side by side as the page is wide, then the next row."""
        from matplotlib import get_data_path
        from PIL import Image, ImageDraw, ImageFont

        scale = SCREEN_DPI * SHARPNESS / 72
        font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans-Bold.ttf", round(9.5 * scale))
        images = [Image.open(io.BytesIO(picture.png())).convert("RGBA") for picture in self.pictures]
        strip, edge, rim = round(24 * scale), round(4 * scale), round(5 * scale)
        places, x, y, tall = [], edge, edge, 0
        for image in images:
            if x > edge and x + image.width - edge > PAGE_WIDTH * SCREEN_DPI * SHARPNESS:
                x, y, tall = edge, y + tall, 0
            places.append((x, y))
            x, tall = x + image.width, max(tall, image.height + strip)
        width = max(x + image.width for (x, _), image in zip(places, images, strict=True)) + edge
        whole = Image.new("RGBA", (width, y + tall + edge))
        pen = ImageDraw.Draw(whole)
        corner = (whole.width - 1, whole.height - 1)
        pen.rounded_rectangle(((0, 0), corner), radius=round(7 * scale), fill=CARD, outline=CARD_EDGE, width=2)
        for image, caption, (x, y) in zip(images, self.captions, places, strict=True):
            pen.text((x + round(11 * scale), y + strip // 2), caption, font=font, fill=INK, anchor="lm")
            inner = image.crop((rim, rim, image.width - rim, image.height - rim))  # without the edge of its own card
            whole.paste(inner, (x + rim, y + strip))
        buffer = io.BytesIO()
        whole.save(buffer, "png")
        return smaller_png(buffer.getvalue())

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> tuple[dict[str, str], dict[str, Any]]:
        return png_bundle(self.png(), self.alt)

    def __repr__(self) -> str:
        return self.alt


def gallery(draw: Draw, controls: Mapping[str, Slider | Choice], positions: Sequence[Mapping[str, Any]]) -> Gallery:
    """`draw` at each of `positions`; controls that a position leaves out stand where they begin."""
    begin = {name: control.value for name, control in controls.items()}
    for position in positions:
        if unknown := set(position) - set(begin):
            raise InvalidParameter(
                f"A position of the picture sets {sorted(unknown)[0]!r}, which is no control. The controls are "
                f"{', '.join(begin)}."
            )
    pictures = tuple(draw(**(begin | dict(position))) for position in positions)
    captions = tuple(
        ", ".join(f"{controls[name].label or name} {controls[name].text(value)}" for name, value in position.items())
        for position in positions
    )
    return Gallery(pictures, tuple(caption or "where the controls begin" for caption in captions))


def explore(draw: Draw, *, positions: Sequence[Mapping[str, Any]], **controls: Slider | Choice) -> Gallery | None:
    """Show `draw(**values)` under its controls, or where no widget can be shown a picture of it at a few `positions`.

    `draw` takes the values of the controls by name and returns a figure. In a notebook it is displayed and nothing
    returned; elsewhere the picture is returned. Raises `InvalidParameter` for a position of an unknown control.
    """
    pictures = gallery(draw, controls, positions)
    if not in_notebook():
        return pictures
    from IPython.display import display

    data, metadata = pictures._repr_mimebundle_()
    try:
        # Written out, since a widget of ipywidgets 7, which Colab has, cannot give it.
        view = {"version_major": 2, "version_minor": 0, "model_id": live(draw, controls).model_id}
        bundle = {"application/vnd.jupyter.widget-view+json": view} | data
        display(bundle, metadata=metadata, raw=True)  # the front end takes the best that it can show
    except ImportError:
        print("(The sliders need ipywidgets, which is not installed. The picture shows a few of their positions.)")
        display(data, metadata=metadata, raw=True)
    return None


def live(draw: Draw, controls: Mapping[str, Slider | Choice]) -> Any:
    """The widget: the controls above one image, drawn anew at each change. Raises ImportError without ipywidgets."""
    import ipywidgets

    begin = {name: control.value for name, control in controls.items()}
    inputs = {name: control.widget(name, begin) for name, control in controls.items()}
    image = ipywidgets.Image(format="png", layout=ipywidgets.Layout(max_width="100%", object_fit="contain"))
    message = ipywidgets.HTML()
    fitting = False

    def redraw(_: object = None) -> None:
        nonlocal fitting
        if fitting:  # a control moves because another one has shortened it: one picture is enough
            return
        fitting = True
        try:
            for name, control in controls.items():
                control.fit(inputs[name], {other: widget.value for other, widget in inputs.items()})
            figure = draw(**{name: widget.value for name, widget in inputs.items()})
            image.value = figure.png(compact=False)
            image.width = str(round(figure.get_figwidth() * SCREEN_DPI))
            message.value = ""
        except Exception as error:
            message.value = f"This cannot be drawn ({type(error).__name__}): {error}"
        finally:
            fitting = False

    for widget in inputs.values():
        widget.observe(redraw, names="value")
    redraw()
    rows = [_with_play(inputs[name]) if getattr(control, "play", False) else inputs[name]
            for name, control in controls.items()]  # fmt: skip
    return ipywidgets.VBox([*rows, message, image])


def _with_play(slider: Any) -> Any:
    """The slider and a button that plays it; they are linked in the browser, so that a step costs one message."""
    import ipywidgets

    button = ipywidgets.Play(
        value=slider.value, min=slider.min, max=slider.max, step=slider.step, interval=800, show_repeat=False
    )
    for trait in ("max", "value"):
        ipywidgets.jslink((slider, trait), (button, trait))
    return ipywidgets.HBox([slider, button])
