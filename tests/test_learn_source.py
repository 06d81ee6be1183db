"""`show`: the lines are those of the file, the caption is relative, and what has no source is refused with reasons."""

import dataclasses
import functools
import html
import inspect
import linecache
import re
import sys
import types
from pathlib import Path

import pytest
from test_learn_style import contrast

import minfer_lib
from minfer_lib.errors import InvalidParameter, MinferError
from minfer_lib.generation import sampling
from minfer_lib.learn import notebooks, show, show_kernel
from minfer_lib.learn.code_view import COLOURS
from minfer_lib.learn.source import Source
from minfer_lib.models import memory

PACKAGE = Path(minfer_lib.__file__).parent


def file_lines(module: types.ModuleType) -> list[str]:
    return Path(module.__file__).read_text(encoding="utf-8").splitlines()


def without_tags(text: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", re.sub(r"<style>.*?</style>", "", text)))


@pytest.mark.parametrize(
    "obj", [sampling.uniform, sampling.Sampler, sampling.Sampler.launch, memory.ModelShape.parameters]
)
def test_lines_are_those_of_the_file(obj):
    source = show(obj)
    whole = file_lines(sys.modules[(obj.fget if isinstance(obj, property) else obj).__module__])
    assert len(source.lines) > 3
    for number, text in source.lines:
        assert whole[number - 1].strip() == text.strip()
    target = inspect.unwrap(obj.fget if isinstance(obj, property) else obj)
    assert [n for n, _ in source.lines] == list(
        range(
            inspect.getsourcelines(target)[1],
            inspect.getsourcelines(target)[1] + len(inspect.getsourcelines(target)[0]),
        )
    )


def test_caption_is_relative_and_names_the_lines():
    source = show(sampling.uniform)
    first, last = source.lines[0][0], source.lines[-1][0]
    assert source.caption == f"minfer_lib/generation/sampling.py, lines {first}-{last}"
    assert show(minfer_lib).caption.startswith("minfer_lib/__init__.py, lines 1-")
    for text in (repr(source), source._repr_html_()):
        assert str(PACKAGE.parent) not in text


def test_a_copied_package_is_named_as_it_is_imported(tmp_path, monkeypatch):
    folder = tmp_path / "experiment" / "copied"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "part.py").write_text("import os\n\n\ndef f():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "experiment"))
    from copied import part

    assert show(part.f).caption == "copied/part.py, lines 4-5"


def test_module_is_shown_whole():
    source = show(sampling)
    assert "\n".join(text for _, text in source.lines) == "\n".join(file_lines(sampling))


def test_only_keeps_the_header_and_the_named_methods():
    source = show(memory.ModelShape, only=["from_config", "layers"])
    text = [line for number, line in source.lines if number]
    assert text[:2] == ["@dataclass(frozen=True)", "class ModelShape:"]
    assert any("def from_config" in line for line in text) and "    layers: int" in text
    assert not any("def parameters" in line for line in text)
    gaps = [note.strip() for number, note in source.lines if number is None]
    assert gaps and all(re.fullmatch(r"⋯ \d+ lines?", note) for note in gaps)
    # the notes count exactly what is missing between the numbers around them
    for before, gap, after in zip(source.lines, source.lines[1:], source.lines[2:], strict=False):
        if gap[0] is None:
            assert int(gap[1].split()[1]) == after[0] - before[0] - 1


def test_only_takes_one_name_and_functions_of_a_module():
    assert "self.eos_ids = frozenset(eos_ids)" in repr(show(sampling.Sampler, only="__init__"))
    assert show(sampling, only="uniform").lines == show(sampling.uniform).lines
    assert show(sampling, only="SORT_FIRST").lines[0][1].startswith("SORT_FIRST = ")


def test_docstring_false_keeps_only_its_first_line():
    long, short = repr(show(sampling.uniform)), repr(show(sampling.uniform, docstring=False))
    summary, rest = inspect.getdoc(sampling.uniform).split("\n\n", 1)
    assert summary in long and summary in short
    assert rest.splitlines()[0] in long and rest.splitlines()[0] not in short
    assert "return" in short and "⋯" in short


def test_decorated_wrapped_and_bound_things_show_what_was_written():
    class Holder:
        @functools.cached_property
        def cached(self):
            return "the cached one"

        @staticmethod
        def static():
            return "the static one"

        def method(self):
            return "the method"

    assert "the cached one" in repr(show(vars(Holder)["cached"]))
    assert "the static one" in repr(show(Holder.static))
    assert "the method" in repr(show(Holder().method))
    assert "the method" in repr(show(functools.partial(Holder.method, None)))


def test_a_cell_of_a_notebook_has_no_file_but_a_source(monkeypatch):
    name = "/tmp/ipykernel_1/123.py"
    code = "import math\n\nclass Typed:\n    def f(self):\n        return math.pi\n\ndef g():\n    return 2\n"
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(code, name, "exec"), vars(main))
    try:
        assert [n for n, _ in show(main.Typed).lines] == [3, 4, 5]
        assert show(main.g).caption.endswith(", lines 7-8") and "/tmp" not in show(main.g).caption
    finally:
        del linecache.cache[name]


@pytest.mark.parametrize(
    "obj", [len, int, 3, "text", None, [].append, sampling.Sampler(), eval("lambda: 1"), type("Made", (), {})]
)
def test_what_has_no_source_is_refused_with_advice(obj):
    with pytest.raises(InvalidParameter, match=r"show\(\) was asked for .*show\(\) takes functions, classes") as caught:
        show(obj)
    assert isinstance(caught.value, MinferError)


def test_an_instance_is_told_the_name_of_its_class():
    with pytest.raises(InvalidParameter, match=r"Use show\(Sampler\)"):
        show(sampling.Sampler())


def test_wrong_names_say_what_is_possible():
    with pytest.raises(InvalidParameter, match=r"'nothing' cannot be shown: Sampler has `__call__`, .*`"):
        show(sampling.Sampler, only="nothing")


def kernel_lines(file):
    return (PACKAGE / "kernels" / file).read_text(encoding="utf-8").splitlines()


def test_a_kernel_in_c_is_shown_between_its_markers():
    file = "c/products.c"
    source, whole = show_kernel(file, "quantize_row", "dot32"), kernel_lines(file)
    code = [(number, text) for number, text in source.lines if number is not None]
    assert all(whole[number - 1] == text for number, text in code)
    assert code[0][1].startswith("/* One token to codes") and whole[code[0][0] - 2] == "/* [quantize_row] */"
    assert code[-1][1] == "}" and whole[code[-1][0]] == "/* [end] */"
    assert sum("(" in text and text.startswith(("static", "ALWAYS")) for _, text in code) == 2
    assert [text for number, text in source.lines if number is None] != []  # what stands between the two is left out
    assert [text for _, text in show_kernel(file).lines] == whole
    assert source.caption.startswith("minfer_lib/kernels/c/products.c, lines ")


def test_a_kernel_in_python_is_shown_without_being_imported():
    source = show_kernel("triton/paged_kernels.py", "_pool_rows")
    assert source.lines[0][1] == "@triton.jit" and source.lines[1][1].startswith("def _pool_rows(")
    assert all(kernel_lines("triton/paged_kernels.py")[number - 1] == text for number, text in source.lines)


def test_every_part_of_a_kernel_that_a_chapter_shows_is_there():
    cells = "".join(path.read_text(encoding="utf-8") for path in (PACKAGE.parent / "notebooks").rglob("*.ipynb"))
    calls = re.findall(r"show_kernel\(([^)]*)\)", cells.replace('\\"', '"'))
    assert calls
    for call in calls:
        assert len(show_kernel(*re.findall(r'"([^"]+)"', call)).lines) > 3


def test_kernels_that_are_not_there_are_told():
    with pytest.raises(InvalidParameter, match=r"'c/no\.c'.* `c/products\.c`"):
        show_kernel("c/no.c")
    with pytest.raises(InvalidParameter, match=r"products\.c has `dot32`, `outputs` or `quantize_row`"):
        show_kernel("c/products.c", "nothing")
    with pytest.raises(InvalidParameter, match=r"paged_kernels\.py has .*`merge_kernel`"):
        show_kernel("triton/paged_kernels.py", "nothing")


def test_html_shows_the_same_text_as_the_terminal():
    source = show(notebooks, docstring=False)
    shown = without_tags(source._repr_html_())
    for number, text in source.lines:
        if number:
            assert f"{number}  {text}" in shown
    assert source.caption in shown


def test_html_is_coloured_and_escaped():
    lines = ((1, "def f(a):"), (2, '    return a < 3  # & "so"'))
    page = Source("x.py, lines 1-2", lines, whole="\n".join(text for _, text in lines), first=1)._repr_html_()
    assert COLOURS["Keyword"] in page.lower() and f"{COLOURS['Comment']}" in page
    assert "&lt;" in page and "&amp;" in page and "<script" not in page


def test_the_size_of_the_font_survives_a_viewer_that_drops_variables():
    page = show(sampling.uniform)._repr_html_()
    (style,) = re.findall(r'<pre style="([^"]*)"', page)
    kept = dict(rule.split(":", 1) for rule in style.split(";") if "var(" not in rule)  # as in an untrusted notebook
    assert (kept["font-size"], kept["line-height"]) == ("12px", "1.45")


def test_colours_survive_where_lines_are_left_out_inside_a_docstring():
    source = show(sampling.uniform)
    inside = dataclasses.replace(source, lines=source.lines[2:4])
    page = inside._repr_html_().lower()
    assert COLOURS["String"] in page and COLOURS["Keyword"] not in page


def test_colours_can_be_read_on_white_and_on_black():
    for colour in COLOURS.values():
        assert contrast(colour, "#ffffff") >= 4.0 and contrast(colour, "#111111") >= 4.0
