"""Every way to multiply with int8 weights, against a float64 reference from the same codes."""

import copy
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minfer_lib import LanguageModel, NaiveEngine, SamplingParams, describe_int8, quantize_int8
from minfer_lib.bench.other_int8 import Fbgemm, PackedBF16
from minfer_lib.errors import InvalidParameter, UnsupportedModel
from minfer_lib.kernels import compiled, compiled_products
from minfer_lib.models import hf_compat
from minfer_lib.models.memory import PeakMemory
from minfer_lib.quant import products
from minfer_lib.quant.absmax import absmax_quantize, pair_safe_quantize
from minfer_lib.quant.linear import Int8Linear
from minfer_lib.quant.products import DYNAMIC, PRODUCTS, TINY, WEIGHT_ONLY, check_kernel, choose, token_codes, why_not

CASES = [(name, "dynamic") for name in DYNAMIC] + [(name, "none") for name in WEIGHT_ONLY]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@pytest.fixture(params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest):
    name, mode = request.param
    if reason := why_not(name):
        pytest.skip(reason)
    return PRODUCTS[name], mode


def layer(
    n: int, k: int, *, bias: bool = True, smoothing: bool = False, mode: str = "dynamic", seed: int = 0
) -> Int8Linear:
    g = torch.Generator().manual_seed(seed + 1000 * n + k)
    matrix = torch.randn(n, k, generator=g) * 10 ** torch.empty(n, 1).uniform_(-3, 1, generator=g)
    quantized = (pair_safe_quantize if mode == "dynamic" else lambda w: absmax_quantize(w, dim=-1))(matrix)
    factors = 10 ** torch.empty(k).uniform_(-1, 1, generator=g) if smoothing else None
    offset = torch.randn(n, generator=g) if bias else None
    return Int8Linear(quantized.values, quantized.scale, offset, activations=mode, smoothing=factors)


def tokens(m: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    g = torch.Generator().manual_seed(1000 * m + k)
    return (torch.randn(m, k, generator=g) * 10 ** torch.empty(m, 1).uniform_(-3, 3, generator=g)).to(dtype)


def check(product, x: torch.Tensor, weights: Int8Linear) -> None:
    """A product against float64, within rounding to the dtype of x and of float32 sums."""
    codes, scale, bias, smoothing = weights.weight, weights.scale, weights.bias, weights.smoothing
    found = product(x, weights)
    assert found.dtype == x.dtype and found.shape == (len(x), len(codes))
    rows = x.float()
    if weights.activations == "dynamic":
        exact = rows if smoothing is None else rows * (1.0 / smoothing)
        rounded, token_scale = token_codes(rows, smoothing)
        rows = rounded.double() * token_scale.double()
        # a number halfway between two codes may go to either, since the ways differ in the order of their operations
        steps = exact.double() / token_scale.double().clamp(min=1e-300)
        halfway = ((steps - steps.floor() - 0.5).abs() < 1e-4).double() * token_scale.double()
        tiny = torch.where(token_scale == 0, exact.double().abs(), 0.0)  # zeros in some ways, in others not
        slack = (halfway + tiny) @ (codes.double().abs() * scale.double()[:, None]).T
    else:
        rows, slack = rows.double(), 0.0
    matrix = codes.double() * scale.double()[:, None]
    wanted = rows @ matrix.T + (0 if bias is None else bias.double())
    sizes = rows.abs() @ matrix.abs().T + (0 if bias is None else bias.double().abs())
    half = EPS[x.dtype] if x.dtype != torch.float32 else 0.0  # rounded once or twice on the way out
    bound = half * wanted.abs() + (half * half + 64 * 2.0**-24) * sizes + slack + 2.0**-148  # float32's smallest steps
    if x.dtype == torch.float16:
        wanted, bound = wanted.clamp(-65504, 65504), bound + 2.0**-24  # which ends there, and has a smallest step
        found = found.clamp(-65504, 65504)
    assert ((found.double() - wanted).abs() <= bound).all(), ((found.double() - wanted).abs() / bound).max()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 33, 130])
def test_odd_shapes(case, n: int):
    product, mode = case
    for m, k in itertools.product((0, 1, 2, 3, 7, 33, 300), (1, 2, 3, 4, 5, 31, 32, 33, 64, 100, 577)):
        weights = layer(n, k, bias=bool(m % 2), smoothing=mode == "dynamic" and m % 3 == 0, mode=mode)
        check(product, tokens(m, k), weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [37, 96, 256])
def test_dtypes(case, dtype: torch.dtype, k: int):
    product, mode = case
    for m in (1, 2, 5):
        for smoothing in {False, mode == "dynamic"}:
            check(product, tokens(m, k, dtype), layer(21, k, smoothing=smoothing, mode=mode))


@pytest.mark.parametrize("k", [32, 63, 576, 1536])
def test_the_largest_sums_there_can_be(case, k: int):
    """All codes at what pairs may reach, with inputs at the largest: nothing is cut off."""
    product, mode = case
    codes = torch.full((8, k), 64, dtype=torch.int8)
    codes[1], codes[2, ::2], codes[3, 1::2] = -64, -64, -64
    codes[4], codes[5], codes[6] = 0, 0, 0
    codes[5, ::2], codes[6, 1::2] = 127, -127
    x = torch.ones(6, k)
    x[1], x[2, ::2], x[3], x[4, 1:] = -1, -1, 0, 0
    check(product, x * 3.7, Int8Linear(codes, torch.linspace(0.5, 2, 8), activations=mode))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_token_that_is_not_finite_spoils_only_itself(case, value: float):
    product, mode = case
    for k in (40, 64):
        for m, bad in ((1, 0), (2, 1), (5, 2)):
            x = tokens(m, k)
            weights = layer(12, k, mode=mode)
            weights.weight[:, 3] = 1
            good = product(x, weights)
            x[bad, 3] = value
            found = product(x, weights)
            assert not found[bad].isfinite().any()
            others = [r for r in range(m) if r != bad]
            assert torch.equal(found[others], good[others])


@pytest.mark.parametrize("size", [0.0, 1e-44, TINY / 2, TINY * 2, 1e-30, 1e30, 3e38])
def test_tokens_of_any_size(case, size: float):
    product, mode = case
    weights = layer(9, 48, mode=mode, bias=False)
    weights.scale = weights.scale * 1e-3
    g = torch.Generator().manual_seed(0)
    x = torch.stack([torch.empty(48).uniform_(-1, 1, generator=g) * size, torch.randn(48, generator=g)])
    if mode == "dynamic":
        check(product, x, weights)
    else:
        wanted = x.double() @ (weights.weight.double() * weights.scale.double()[:, None]).T
        found = product(x, weights).double()
        limit = 1e-5 * wanted.abs().amax(1, keepdim=True) + 1e-36
        assert (((found - wanted).abs() <= limit) | (wanted.abs() > 3e38) | ~found.isfinite()).all()
        assert found.isfinite().all() or size > 1e37  # the sum before the scale is beyond float32


def test_inputs_in_any_layout(case):
    product, mode = case
    for dtype in (torch.float32, torch.bfloat16):
        weights = layer(12, 64, mode=mode)
        x = tokens(6, 64, dtype)
        wanted = product(x, weights)
        wide = torch.zeros(12, 130, dtype=dtype)
        wide[::2, 1:129:2] = x
        for other in (x.t().contiguous().t(), wide[::2, 1:129:2], torch.cat([x, x], 1)[:, 64:], x.flip(0).flip(0)):
            before = other.clone()
            assert torch.equal(product(other, weights), wanted)
            assert torch.equal(other, before)  # an input is only read
        one = tokens(1, 64, dtype)
        assert torch.equal(product(one.expand(5, 64), weights), product(one.repeat(5, 1), weights))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(4, 4), (37, 64), (50, 100), (130, 577)])
@pytest.mark.parametrize("mode", ["dynamic", "none"])
def test_company_and_threads_change_no_bit_of_the_compiled_kernel(mode: str, n: int, k: int, dtype: torch.dtype):
    if reason := why_not("compiled"):
        pytest.skip(reason)
    product, weights = PRODUCTS["compiled"], layer(n, k, mode=mode, smoothing=mode == "dynamic")
    x = tokens(200, k, dtype)  # more than are computed together
    together = product(x, weights)
    for r in (0, 1, 8, 127, 128, 199):
        assert torch.equal(product(x[r : r + 1], weights)[0], together[r])
    assert torch.equal(product(x[1:6], weights), together[1:6])
    assert torch.equal(product(x.flip(0), weights), together.flip(0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(product(x, weights), together)
    finally:
        torch.set_num_threads(before)


def test_integer_products_agree_bit_for_bit():
    """Sums of integers are exact, so that what is left is a multiplication by two scales, in the same order."""
    for k in (64, 577):
        x, weights = tokens(5, k), layer(24, k, bias=False, smoothing=True)
        found = [PRODUCTS[name](x, weights) for name in DYNAMIC if why_not(name) is None]
        for other in found[1:]:
            assert (other - found[0]).abs().max() <= 2e-7 * found[0].abs().max()


def test_a_layer_may_be_used_by_many_threads_at_once(case):
    product, mode = case
    weights = layer(40, 300, mode=mode)
    inputs = [tokens(m, 300) for m in (1, 2, 150, 7)]
    wanted = [product(x, weights) for x in inputs]
    weights = layer(40, 300, mode=mode)  # nothing is derived from its codes yet
    begin, wrong = threading.Barrier(4), []

    def work(x: torch.Tensor, result: torch.Tensor) -> None:
        begin.wait(10)
        wrong.extend(
            turn for turn in range(50) if (product(x, weights) - result).abs().max() > 1e-5 * result.abs().max()
        )

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, wanted, strict=True)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert not wrong


@pytest.mark.parametrize("mode", ["dynamic", "none"])
def test_nothing_of_a_long_prompt_stays(mode: str):
    if reason := why_not("compiled"):
        pytest.skip(reason)
    weights, x = layer(8, 512, mode=mode), tokens(4000, 512)
    with PeakMemory() as peak:
        PRODUCTS["compiled"](x, weights)
    assert peak.live_bytes <= 4 * 8 + 1024  # the sums of the rows


# -- torch's own, which chapter 5 compares with -----------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 2, 33])
def test_torchs_own_products_give_the_same(m: int):
    weights, x = layer(32, 64, bias=False), tokens(m, 64)
    matrix = weights.dequantized().double()
    sizes = x.double().abs() @ matrix.abs().T
    for kind, given, bound in ((Fbgemm, x, 0.02), (PackedBF16, x.bfloat16(), 0.02)):
        try:
            found = kind(weights.weight, weights.scale)(given)
        except UnsupportedModel as error:
            pytest.skip(str(error))
        assert found.dtype == given.dtype
        assert ((found.double() - given.double() @ matrix.T).abs() <= bound * sizes).all()


# -- which one is used ------------------------------------------------------------------------------------------------


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """A machine where these products alone can be used."""
    monkeypatch.setattr(products, "why_not", lambda name: None if name in names else "not here")
    monkeypatch.setattr(products, "choose", choose.__wrapped__)


def test_the_first_that_can_be_used_is_taken(monkeypatch: pytest.MonkeyPatch):
    for here, dynamic, weight_only in (
        (("compiled", "int_mm", "portable"), "compiled", "compiled"),
        (("int_mm", "portable"), "int_mm", "portable"),
        (("portable",), "portable", "portable"),
    ):
        only(monkeypatch, *here)
        assert products.choose(True, "cpu") == dynamic and products.choose(False, "cpu") == weight_only
        assert products.choose(True, "cpu", "portable") == "portable"
        assert products.choose(True, "cpu", "fbgemm") == dynamic  # of a folder that an older version wrote
        assert products.choose(False, "cpu", "int_mm") == weight_only
        assert products.choose(True, "mps") == products.choose(False, "mps") == "portable"


def test_names_that_can_be_asked_for(monkeypatch: pytest.MonkeyPatch):
    only(monkeypatch, "portable", "int_mm")
    check_kernel("portable", True), check_kernel("portable", False), check_kernel("int_mm", True)
    with pytest.raises(InvalidParameter, match=r"kernel must be `compiled` or `portable` with activations='none'"):
        check_kernel("int_mm", False)
    with pytest.raises(InvalidParameter, match=r"kernel must be one that this machine can use \(not here\)"):
        check_kernel("compiled", True)


@pytest.mark.parametrize("name", ["cublas", "", 5, None, ["portable"], True, "triton"])
def test_unknown_names(name: object):
    with pytest.raises(InvalidParameter, match="kernel must be"):
        check_kernel(name, True)


# -- what the proof refuses -------------------------------------------------------------------------------------------

real = hf_compat.int_mm
WRONG = {
    "sums off by one": lambda a, b: real(a, b) + 1,
    "one sum off by one": lambda a, b: real(a, b).index_put_((torch.tensor(2), torch.tensor(0)), torch.tensor(7)),
    "memory left unwritten": lambda a, b: torch.empty(len(a), b.shape[1], dtype=torch.int32),
    "unwritten for few inputs": lambda a, b: (
        real(a, b) if a.shape[1] > 3 else torch.empty(len(a), b.shape[1], dtype=torch.int32)
    ),
    "the call before": lambda a, b, last={}: last.setdefault((a.shape, b.shape), real(a, b)),
    "pairs cut off at 16 bits": lambda a, b: torch.stack(
        [(a[:, i : i + 2].int() @ b[i : i + 2].int()).clamp(-8000, 8000) for i in range(0, a.shape[1], 2)]
    ).sum(0, dtype=torch.int32),
    "the wrong type": lambda a, b: None,
    "not there": None,
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_product_is_refused(monkeypatch: pytest.MonkeyPatch, kind: str):
    assert why_not.__wrapped__("int_mm") is None
    monkeypatch.setattr(hf_compat, "int_mm", WRONG[kind])
    assert why_not.__wrapped__("int_mm") is not None
    assert why_not.__wrapped__("portable") is None


def test_a_wrong_kernel_is_refused(monkeypatch: pytest.MonkeyPatch):
    if reason := why_not("compiled"):
        pytest.skip(reason)
    right = compiled_products.c_function()
    monkeypatch.setattr(compiled_products, "c_function", lambda: lambda call: 0)  # writes nothing
    assert "wrong" in why_not.__wrapped__("compiled")
    monkeypatch.setattr(compiled_products, "c_function", lambda: right)
    assert why_not.__wrapped__("compiled") is None


# -- the compiler -----------------------------------------------------------------------------------------------------

LOADS = "import torch\nfrom minfer_lib.kernels.compiled import library\nprint(bool(library().product))"
needs_compiler = pytest.mark.skipif(why_not("compiled") is not None, reason="no compiler here")


@pytest.fixture()
def afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has just begun, with an empty cache: nothing is known of compiler and kernels."""

    def forget() -> None:
        for found in (compiled.library, compiled_products.c_function, choose, why_not):
            found.cache_clear()

    monkeypatch.setenv("MINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    forget()
    yield
    forget()


def kernels_of_a_model(tiny: LanguageModel) -> set[str]:
    """What runs a small model in int8, which answers."""
    lm = LanguageModel.of(copy.deepcopy(tiny.model), None, "tiny")
    lm = quantize_int8(lm, calibration=[[1, 2, 3]], progress=False)
    output = NaiveEngine(lm).generate([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))[0]
    assert len(output.token_ids) == 3
    return set(describe_int8(lm).kernels)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_why_there_is_no_compiled_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINFER_CACHE", str(tmp_path / "cache"))
    cases = {
        "": "MINFER_CC is empty",
        str(tmp_path / "nowhere"): "no C compiler `.*nowhere`",
        script(tmp_path / "fails", "exit 1"): "fails` failed: it cannot even preprocess",
        script(tmp_path / "silent", 'case "$*" in *-dM*) exit 0;; esac; exit 3'): "silent` failed: .*exit status 3",
        script(
            tmp_path / "says", 'case "$*" in *-dM*) exit 0;; esac; echo "no memory" >&2; exit 1'
        ): "failed: no memory",
        script(tmp_path / "lies", 'for last; do :; done; echo nonsense > "$last"'): "lies` failed: .+",
    }
    for compiler, reason in cases.items():
        monkeypatch.setenv("MINFER_CC", compiler)
        with pytest.raises(compiled.CannotCompile, match=reason):
            compiled.library.__wrapped__()
    # nothing half made is left behind that a later process could take for a kernel
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".partial")]


@pytest.mark.usefixtures("afresh")
def test_without_a_compiled_kernel_the_model_still_works(
    tiny: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MINFER_CC", script(tmp_path / "fails", "exit 1"))
    assert "compiled" not in kernels_of_a_model(tiny) and "fails` failed" in why_not("compiled")


@needs_compiler
@pytest.mark.usefixtures("afresh")
def test_sums_that_a_compiler_gets_wrong_by_one_are_refused(
    tiny: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wrong = script(
        tmp_path / "off-by-one",
        f"""args=""
for a in "$@"; do
    case "$a" in *.c) args="$args -I$(dirname $a)"
                      sed 's/= four_sums(/= 1 + four_sums(/' "$a" > {tmp_path}/wrong.c; a={tmp_path}/wrong.c;; esac
    args="$args $a"
done
exec cc $args""",
    )
    monkeypatch.setenv("MINFER_CC", wrong)
    assert "compiled" not in kernels_of_a_model(tiny) and why_not("compiled") == "its sums are wrong on this CPU"


@needs_compiler
def test_two_processes_may_compile_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    environment = {**os.environ, "MINFER_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(Path(__file__).parents[1])}
    running = [
        subprocess.Popen([sys.executable, "-c", LOADS], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0] for process in running] == ["True\n", "True\n"]
    kernels = tmp_path / "cache" / "kernels"
    assert {path.suffix for path in kernels.iterdir()} == {".so"}
    key = {path: path.stat().st_ino for path in kernels.iterdir()}
    monkeypatch.setenv("MINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "_build", lambda *args: pytest.fail("compiled again"))
    assert compiled.library.__wrapped__().product  # the next one finds it
    assert {path: path.stat().st_ino for path in kernels.iterdir()} == key
    monkeypatch.undo()
    monkeypatch.setenv("MINFER_CACHE", str(tmp_path / "cache"))
    for path in kernels.iterdir():
        path.unlink()
        path.write_bytes(b"")  # a damaged one is passed over
    assert compiled.library.__wrapped__().product


@needs_compiler
def test_threads_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINFER_CACHE", str(tmp_path))
    builds, build = [], compiled._build
    monkeypatch.setattr(compiled, "_build", lambda *args: builds.append(args) or build(*args))
    threads = [threading.Thread(target=compiled.library.__wrapped__) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert len(builds) == 1


@needs_compiler
@pytest.mark.usefixtures("afresh")
def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path):
    (tmp_path / "cache").write_text("a file stands where the folder should be")
    assert why_not("compiled") is None
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]  # nothing is left behind


@needs_compiler
@pytest.mark.usefixtures("afresh")
def test_a_full_cache_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    full = 'case "$*" in *cache/kernels*) echo "No space left on device" >&2; exit 1;; esac; exec cc "$@"'
    monkeypatch.setenv("MINFER_CC", script(tmp_path / "full", full))
    assert why_not("compiled") is None
    assert not [*(tmp_path / "cache" / "kernels").iterdir()]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "full"]


def refuse_below(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> list[Path]:
    """Nothing can be loaded from these folders, as from a mount with noexec; returns what was tried."""
    tried, load = [], compiled._load

    def loaded(path: Path, options: list[str]):
        tried.append(path)
        if any(folder in path.parents for folder in folders):
            raise OSError(f"{path.name}: failed to map segment from shared object")
        return load(path, options)

    monkeypatch.setattr(compiled, "_load", loaded)
    return tried


@needs_compiler
def test_a_cache_from_which_nothing_may_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache, temporary = tmp_path / "cache", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("MINFER_CACHE", str(cache))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(compiled, "TARGETS", compiled.TARGETS[-1:])  # else a dozen ways are tried
    with monkeypatch.context() as patch:
        refuse_below(patch, cache)
        assert compiled.library.__wrapped__().has_threads
        assert not [*temporary.iterdir()] and not [*(cache / "kernels").iterdir()]
    with monkeypatch.context() as patch:
        refuse_below(patch, cache, temporary)
        with pytest.raises(compiled.CannotCompile, match="failed to map segment"):
            compiled.library.__wrapped__()


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners here")
@pytest.mark.parametrize("who", ["file for all", "file of another", "folder for all", "folder of another", "a link"])
def test_a_library_that_others_could_have_written_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
):
    if "another" in who and os.getuid() != 0:
        pytest.skip("only root can give a file away")
    monkeypatch.setenv("MINFER_CACHE", str(tmp_path))
    compiled.library.__wrapped__()
    (library,) = (tmp_path / "kernels").iterdir()
    if who == "a link":
        library.rename(tmp_path / "elsewhere.so")
        library.symlink_to(tmp_path / "elsewhere.so")
    else:
        target = library if "file" in who else library.parent
        target.chmod(0o777) if "all" in who else os.chown(target, 12345, 12345)
    loaded = refuse_below(monkeypatch)
    if who == "folder for all":  # of our own: closed, since others may have put something there
        before = library.read_bytes()
        compiled.library.__wrapped__()
        assert library.parent.stat().st_mode & 0o022 == 0 and library.read_bytes() == before
    else:
        compiled.library.__wrapped__()
    assert library not in loaded and len(loaded) == 1
    if who == "folder of another":
        assert tmp_path not in loaded[0].parents or "kernels" not in loaded[0].parts


@needs_compiler
def test_the_cache_is_kept_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINFER_CACHE", str(tmp_path))
    kernels = tmp_path / "kernels"
    names = {".partial-old": 2, ".partial-new": 0, "int8_linear-1-2.so": 31, "paged_decode-3-4.so": 29}
    for name, days in names.items():
        (kernels / name).mkdir(parents=True) if name.startswith(".") else (kernels / name).write_text("")
        os.utime(kernels / name, (time.time() - days * 86400,) * 2)
    compiled.library.__wrapped__()
    left = {path.name for path in kernels.iterdir()}
    assert left & set(names) == {".partial-new", "paged_decode-3-4.so"} and len(left) == 3


@needs_compiler
def test_compilers_of_several_words_and_without_torchs_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As `ccache cc`, and clang, whose OpenMP needs symbols of a runtime that torch did not load."""
    assert "thread" not in products.describe_products("cpu")
    monkeypatch.setenv("MINFER_CACHE", str(tmp_path / "cache"))
    ccache = script(tmp_path / "ccache", 'exec "$@"')
    monkeypatch.setenv("MINFER_CC", f"{ccache} cc")
    assert compiled.library.__wrapped__().has_threads
    clang = 'case "$*" in *-fopenmp*-c*) set -- "$@" -Dfree=__kmpc_fork_call;; esac; exec cc "$@"'
    monkeypatch.setenv("MINFER_CC", script(tmp_path / "clang", clang))
    assert not compiled.library.__wrapped__().has_threads
    monkeypatch.setattr(compiled, "_build", lambda *args: pytest.fail("compiled in vain, at every start"))
    assert not compiled.library.__wrapped__().has_threads
    monkeypatch.setattr(compiled, "library", compiled.library.__wrapped__)
    assert products.describe_products("cpu").startswith("compiled, weight-only compiled; in one thread")
