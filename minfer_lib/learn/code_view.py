"""How source looks in a notebook: coloured, with the line numbers of its file.

Invariant: the colours can be read on white and on black, and the numbers are not copied along with the code.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

# Colour by kind of token: the middle tones are legible on white and on black, for viewers that drop style sheets (an
# untrusted notebook); JupyterLab and exported HTML replace them by the colours of their theme.
_KINDS = {
    "k": ("#9a5fb5", "keyword"),
    "s": ("#c2593d", "string"),
    "c": ("#748090", "comment"),
    "n": ("#2f8a6b", "number"),
    "d": ("#3d7fc4", "def"),
}
_SHEET = "".join(
    f".minfer-{kind}{{color:var(--jp-mirror-editor-{name}-color,{colour})!important}}"
    for kind, (colour, name) in _KINDS.items()
)
# One property each: the viewer of an untrusted notebook drops a property whose value it does not know, such as a
# variable, and with the shorthand it would drop the size as well.
_FONT = "font-size:12px;line-height:1.45;font-family:var(--jp-code-font-family,ui-monospace,Menlo,Consolas,monospace)"


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
            f"<style>{_SHEET}</style>"
            f'<div style="font-size:90%;opacity:0.75;margin:4px 0"><code>{html.escape(self.caption)}</code></div>'
            f'<pre style="{_FONT};white-space:pre;margin:0;padding:8px 12px;overflow-x:auto;'
            'border-left:3px solid rgba(128,128,128,0.5)">' + "\n".join(rows) + "</pre>"
        )


def _highlighted(code: str, language: str = "python") -> list[str]:
    """The lines of `code` as HTML. Uncoloured where Pygments is missing."""
    try:
        from pygments import lex
        from pygments.lexers import get_lexer_by_name
        from pygments.token import Comment, Keyword, Name, Number, Operator, String
    except ImportError:
        return html.escape(code, quote=False).split("\n")
    kinds = [(Keyword, "k"), (Operator.Word, "k"), (String, "s"), (Comment, "c"), (Number, "n"), (Name.Decorator, "d"),
             (Name.Function, "d"), (Name.Class, "d")]  # fmt: skip
    result = [""]
    for token, text in lex(code, get_lexer_by_name(language, stripnl=False, ensurenl=False)):
        kind = next((kind for parent, kind in kinds if token in parent), None)
        for n, part in enumerate(text.split("\n")):
            if n:
                result.append("")
            if part:
                escaped = html.escape(part, quote=False)
                span = (
                    f'<span class="minfer-{kind}" style="color:{_KINDS[kind][0]}">{escaped}</span>' if kind else escaped
                )
                result[-1] += span
    return result
