"""The style: colours that keep apart and can be read, pictures that are the same each time."""

import io
import itertools
import subprocess
import sys

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from minfer_lib.learn import colour_of, style, use_style
from minfer_lib.learn.style import CARD, ENGINE_COLOURS, INK, SOFT_INK, bar_style, canvas, drawing, headline

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
SEEN_WITH = {
    "full colour vision": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def linear(colour: str) -> np.ndarray:
    rgb = np.array(mpl.colors.to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """Contrast ratio of WCAG 2: 1 (none) to 21."""
    dark, light = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other))
    return (light + 0.05) / (dark + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ np.clip(rgb, 0, 1)
    f = np.where((t := xyz / [0.9505, 1.0, 1.089]) > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eyes", SEEN_WITH)
def test_engine_colours_keep_apart_for_everybody(eyes):
    seen = {engine: lab(SEEN_WITH[eyes] @ linear(colour)) for engine, colour in ENGINE_COLOURS.items()}
    for a, b in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[a] - seen[b]) > 20, f"{a} and {b} look alike with {eyes}"


def test_colours_can_be_read_on_the_card():
    assert contrast(INK, CARD) > 7 and contrast(SOFT_INK, CARD) > 4.5 and contrast(style.ALERT, CARD) > 4.5
    for colour in ENGINE_COLOURS.values():
        assert contrast(colour, CARD) >= 3.0


def test_text_on_fills_can_be_read():
    for fill in (*ENGINE_COLOURS.values(), *style.GROUP_COLOURS, style.UNUSED):
        assert contrast(style.on_colour(fill), fill) >= 3.0


@pytest.mark.parametrize(
    ("label", "family"),
    [
        ("naive", "naive"),
        ("cached (hf)", "cached"),
        ("paged + int8", "paged"),
        ("int8 slots", "int8"),
        ("LLMEngine fast paged", "fast"),
        ("hf generate", None),
        ("HF static batch, cached", None),
        ("vLLM", None),
        ("something else", None),
        ("yours", "yours"),
        ("yours, on slots", "yours"),
    ],
)
def test_labels_find_their_engine(label, family):
    assert style.engine_family(label) == family
    assert colour_of(label) == (ENGINE_COLOURS[family] if family else style.PEER_FILL)
    assert bar_style(label)["edgecolor"] == ("none" if family not in (None, "yours") else INK)
    assert ("hatch" in bar_style(label)) is (family == "yours")


def test_an_engine_itself_has_its_colour():
    class Engine:
        name = "cached"

    assert colour_of(Engine()) == ENGINE_COLOURS["cached"]
    assert len({style.marker_of(e) for e in (*ENGINE_COLOURS, "hf generate")}) == 8


@drawing
def small_picture() -> style.Picture:
    figure, ax = canvas(3.0, 1.5)
    ax.plot([0, 1], [0, 1])
    headline(figure, "A line")
    figure.alt = "a line from 0 to 1"
    return figure


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"))


def test_the_card_is_opaque_and_its_corners_are_not():
    image = pixels(small_picture().png())
    assert image.shape == (288, 576, 4)
    assert image[0, 0, 3] == 0  # outside of the rounded corner
    inside = image[12:-12, 12:-12]
    assert (inside[..., 3] == 255).all()
    assert tuple(inside[8, -8, :3]) == tuple(round(255 * c) for c in mpl.colors.to_rgb(CARD))


def test_the_same_picture_gives_the_same_bytes_and_few_of_them():
    one, other = small_picture().png(), small_picture().png()
    assert one == other and len(one) < 15_000
    assert b"Matplotlib" not in one


def test_compact_pictures_look_the_same():
    exact, compact = (pixels(small_picture().png(compact=c)).astype(int) for c in (False, True))
    assert abs(exact - compact).max() < 24 and abs(exact - compact).mean() < 0.2


def test_a_drawing_leaves_the_readers_settings_alone():
    before = dict(mpl.rcParams)
    small_picture().png()
    assert dict(mpl.rcParams) == before


def test_a_dollar_sign_is_text():
    figure = small_picture()
    figure.axes[0].text(0.5, 0.5, "a $ and a $ \\frac", parse_math=False)
    figure.png()

    @drawing
    def with_dollars() -> style.Picture:
        figure, ax = canvas(3.0, 1.5)
        ax.text(0, 0, r"$\broken{")  # would raise as a formula
        headline(figure, r"$\broken{")
        return figure

    with_dollars().png()


def test_use_style_changes_the_readers_own_figures():
    with mpl.rc_context():
        use_style()
        assert mpl.rcParams["figure.facecolor"] == CARD and mpl.rcParams["axes.spines.top"] is False


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (46_080, "45.0 KiB"),
        (2**30, "1.00 GiB"),
        (15.5 * 2**30, "15.5 GiB"),
        (2**41, "2048 GiB"),
    ],
)
def test_bytes_are_said_in_powers_of_1024(count, text):
    assert style.format_bytes(count) == text


def test_the_core_and_learn_load_no_drawing_library_until_it_is_used():
    code = (
        "import sys, minfer_lib, minfer_lib.learn as learn\n"
        "heavy = {'matplotlib', 'pygments', 'ipywidgets', 'IPython'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert 'minfer_lib.learn' in sys.modules and 'plots' in dir(learn)\n"
        "learn.show\n"
        "assert 'matplotlib' not in sys.modules\n"
        "learn.plots.token_boxes\n"
        "assert 'matplotlib' in sys.modules\n"
        "try:\n    learn.nothing\nexcept AttributeError as error:\n    assert 'plots' in str(error)\n"
        "else:\n    raise SystemExit('no error')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
