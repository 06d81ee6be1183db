"""How source looks in a notebook: coloured, with the line numbers of its file.

Invariant: the colours can be read on white and on black, and the numbers are not copied along with the code.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

# One property each: the viewer of an untrusted notebook drops a property whose value it does not know, such as a
# variable, and with the shorthand it would drop the size as well.
_FONT = "font-size:12px;line-height:1.45;font-family:var(--jp-code-font-family,ui-monospace,Menlo,Consolas,monospace)"
# Middle tones, legible on white and on black: an output cannot know on which of them it is seen.
COLOURS = {
    "Keyword": "#9a5fb5", "Operator.Word": "#9a5fb5", "String": "#c2593d", "Comment": "#748090", "Number": "#2f8a6b",
    "Name.Decorator": "#3d7fc4", "Name.Function": "#3d7fc4", "Name.Class": "#3d7fc4",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """Lines of a file, to be displayed.

    lines: (number in the file, text), or (None, note) where lines are missing. whole: the text that they are from,
    whose first line has the number `first`; colours are found in it, since a line alone may be inside a string.
    """

    caption: str
    lines: tuple[tuple[int | None, str], ...]
    whole: str
    first: int
    language: str = "python"  # as Pygments calls it

    def __repr__(self) -> str:
        width = len(str(max(number or 0 for number, _ in self.lines)))
        numbered = [f"{number or '':>{width}}  {text}".rstrip() for number, text in self.lines]
        return "\n".join([self.caption, "", *numbered])

    def _repr_html_(self) -> str:
        width = len(str(max(number or 0 for number, _ in self.lines)))
        coloured = _highlighted(self.whole, self.language)
        rows = []
        for number, text in self.lines:
            gutter = f'<span style="opacity:0.5;user-select:none">{number or "":>{width}}  </span>'
            note = f'<span style="opacity:0.6">{html.escape(text)}</span>'
            rows.append(gutter + (note if number is None else coloured[number - self.first]))
        return (
            f'<div style="font-size:90%;opacity:0.75;margin:4px 0"><code>{html.escape(self.caption)}</code></div>'
            f'<pre style="{_FONT};white-space:pre;margin:0;padding:8px 12px;overflow-x:auto;'
            'border-left:3px solid rgba(128,128,128,0.5)">' + "\n".join(rows) + "</pre>"
        )


def _highlighted(code: str, language: str = "python") -> list[str]:
    """The lines of `code` as HTML. Uncoloured where Pygments is missing."""
    try:
        from pygments import highlight, token
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import get_lexer_by_name
        from pygments.style import Style
    except ImportError:
        return html.escape(code, quote=False).split("\n")
    colours = {token.string_to_tokentype(kind): colour for kind, colour in COLOURS.items()}
    style = type("Readable", (Style,), {"styles": colours})
    formatter = HtmlFormatter(style=style, noclasses=True, nowrap=True)
    return highlight(code, get_lexer_by_name(language, stripnl=False, ensurenl=False), formatter).split("\n")
