"""Every way to multiply with int8 weights, against a float64 reference from the same codes."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minfer_lib.errors import InvalidParameter
from minfer_lib.kernels import compiled
from minfer_lib.quant.absmax import absmax_quantize, pair_safe_quantize
from minfer_lib.quant.products import (
    DYNAMIC,
    TINY,
    WEIGHT_ONLY,
    Weights,
    check_kernel,
    choose,
    timings,
    token_codes,
    usable,
)

CASES = [(kernel.name, True) for kernel in DYNAMIC] + [(kernel.name, False) for kernel in WEIGHT_ONLY]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
CPU = torch.device("cpu")


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{'dynamic' if case[1] else 'none'}")
def case(request: pytest.FixtureRequest):
    name, dynamic = request.param
    kernel = usable(name)
    if isinstance(kernel, str):
        pytest.skip(kernel)
    return kernel, dynamic


def layer(
    n: int, k: int, *, bias: bool = True, smoothing: bool = False, dynamic: bool = True, seed: int = 0
) -> Weights:
    g = torch.Generator().manual_seed(seed + 1000 * n + k)
    matrix = torch.randn(n, k, generator=g) * 10 ** torch.empty(n, 1).uniform_(-3, 1, generator=g)
    quantized = (pair_safe_quantize if dynamic else lambda w: absmax_quantize(w, dim=-1))(matrix)
    inverse = 10 ** torch.empty(k).uniform_(-1, 1, generator=g) if smoothing else None
    return Weights(quantized.values, quantized.scale[:, 0], torch.randn(n, generator=g) if bias else None, inverse)


def tokens(m: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    g = torch.Generator().manual_seed(1000 * m + k)
    return (torch.randn(m, k, generator=g) * 10 ** torch.empty(m, 1).uniform_(-3, 3, generator=g)).to(dtype)


def check(kernel, dynamic: bool, x: torch.Tensor, weights: Weights) -> None:
    """The kernel's product against float64, within rounding to the dtype of x and of float32 sums."""
    codes, scale, bias, inverse = weights.codes, weights.scale, weights.bias, weights.inverse
    kernel.prepare(weights, dynamic)
    if kernel.packs:
        assert torch.equal(kernel.unpack(weights), codes)
        weights.codes = None  # as a layer does
    found = kernel.product(x, weights, dynamic)
    assert found.dtype == x.dtype and found.shape == (len(x), len(codes))
    rows = x.float()
    if dynamic:
        exact = rows if inverse is None else rows * inverse
        rounded, token_scale = token_codes(rows, inverse)
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
    if kernel.name == "int8pack_mm" and x.dtype == torch.bfloat16:
        bound = bound + half * sizes
    if x.dtype == torch.float16:
        wanted, bound = wanted.clamp(-65504, 65504), bound + 2.0**-24  # which ends there, and has a smallest step
        found = found.clamp(-65504, 65504)
    assert ((found.double() - wanted).abs() <= bound).all(), ((found.double() - wanted).abs() / bound).max()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 33, 130])
def test_odd_shapes(case, n: int):
    kernel, dynamic = case
    for m, k in itertools.product((0, 1, 2, 3, 7, 33), (1, 2, 3, 4, 5, 31, 32, 33, 64, 100, 577)):
        weights = layer(n, k, bias=bool(m % 2), smoothing=dynamic and m % 3 == 0, dynamic=dynamic)
        check(kernel, dynamic, tokens(m, k), weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [37, 96, 256])
def test_dtypes(case, dtype: torch.dtype, k: int):
    kernel, dynamic = case
    for m in (1, 2, 5):
        for smoothing in {False, dynamic}:
            check(kernel, dynamic, tokens(m, k, dtype), layer(21, k, smoothing=smoothing, dynamic=dynamic))


@pytest.mark.parametrize("k", [32, 63, 576, 1536])
def test_the_largest_sums_there_can_be(case, k: int):
    """All codes at what pairs may reach, with inputs at the largest: nothing is cut off."""
    kernel, dynamic = case
    codes = torch.full((8, k), 64, dtype=torch.int8)
    codes[1], codes[2, ::2], codes[3, 1::2] = -64, -64, -64
    codes[4], codes[5], codes[6] = 0, 0, 0
    codes[5, ::2], codes[6, 1::2] = 127, -127
    x = torch.ones(6, k)
    x[1], x[2, ::2], x[3], x[4, 1:] = -1, -1, 0, 0
    check(kernel, dynamic, x * 3.7, Weights(codes, torch.linspace(0.5, 2, 8)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_token_that_is_not_finite_spoils_only_itself(case, value: float):
    kernel, dynamic = case
    for k in (40, 64):
        for m, bad in ((1, 0), (2, 1), (5, 2)):
            x = tokens(m, k)
            weights = layer(12, k, dynamic=dynamic)
            weights.codes[:, 3] = 1
            kernel.prepare(weights, dynamic)
            good = kernel.product(x, weights, dynamic)
            x[bad, 3] = value
            found = kernel.product(x, weights, dynamic)
            assert not found[bad].isfinite().any()
            others = [r for r in range(m) if r != bad]
            assert torch.equal(found[others], good[others])


@pytest.mark.parametrize("size", [0.0, 1e-44, TINY / 2, TINY * 2, 1e-30, 1e30, 3e38])
def test_tokens_of_any_size(case, size: float):
    kernel, dynamic = case
    weights = layer(9, 48, dynamic=dynamic, bias=False)
    weights.scale = weights.scale * 1e-3
    g = torch.Generator().manual_seed(0)
    x = torch.stack([torch.empty(48).uniform_(-1, 1, generator=g) * size, torch.randn(48, generator=g)])
    if dynamic:
        check(kernel, dynamic, x, weights)
    else:
        wanted = x.double() @ (weights.codes.double() * weights.scale.double()[:, None]).T
        kernel.prepare(weights, dynamic)
        found = kernel.product(x, weights, dynamic).double()
        limit = 1e-5 * wanted.abs().amax(1, keepdim=True) + 1e-36
        assert (((found - wanted).abs() <= limit) | (wanted.abs() > 3e38) | ~found.isfinite()).all()
        assert found.isfinite().all() or size > 1e37  # the sum before the scale is beyond float32


def test_inputs_in_any_layout(case):
    kernel, dynamic = case
    for dtype in (torch.float32, torch.bfloat16):
        weights = layer(12, 64, dynamic=dynamic)
        kernel.prepare(weights, dynamic)
        x = tokens(6, 64, dtype)
        wanted = kernel.product(x, weights, dynamic)
        wide = torch.zeros(12, 130, dtype=dtype)
        wide[::2, 1:129:2] = x
        for other in (x.t().contiguous().t(), wide[::2, 1:129:2], torch.cat([x, x], 1)[:, 64:], x.flip(0).flip(0)):
            before = other.clone()
            assert torch.equal(kernel.product(other, weights, dynamic), wanted)
            assert torch.equal(other, before)  # an input is only read
        one = tokens(1, 64, dtype)
        assert torch.equal(
            kernel.product(one.expand(5, 64), weights, dynamic), kernel.product(one.repeat(5, 1), weights, dynamic)
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(4, 4), (37, 64), (50, 100), (130, 577)])
@pytest.mark.parametrize("dynamic", [True, False])
def test_company_and_threads_change_no_bit_of_the_compiled_kernel(dynamic: bool, n: int, k: int, dtype: torch.dtype):
    kernel = usable("compiled")
    if isinstance(kernel, str):
        pytest.skip(kernel)
    weights = layer(n, k, dynamic=dynamic, smoothing=dynamic)
    kernel.prepare(weights, dynamic)
    x = tokens(9, k, dtype)
    together = kernel.product(x, weights, dynamic)
    for r in range(9):
        assert torch.equal(kernel.product(x[r : r + 1], weights, dynamic)[0], together[r])
    assert torch.equal(kernel.product(x[1:6], weights, dynamic), together[1:6])
    assert torch.equal(kernel.product(x.flip(0), weights, dynamic), together.flip(0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(kernel.product(x, weights, dynamic), together)
    finally:
        torch.set_num_threads(before)


def test_integer_kernels_agree_bit_for_bit():
    """Sums of integers are exact, so that what is left is a multiplication by two scales, in the same order."""
    for k in (64, 577):
        x, found = tokens(5, k), []
        for name in ("compiled", "int_mm", "portable"):
            kernel, weights = usable(name), layer(24, k, bias=False, smoothing=True)
            if not isinstance(kernel, str):
                kernel.prepare(weights, True)
                found.append(kernel.product(x, weights, True))
        for other in found[1:]:
            assert (other - found[0]).abs().max() <= 2e-7 * found[0].abs().max()


# -- which one is used ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fastest_is_chosen(dynamic: bool, dtype: torch.dtype):
    times = timings(dynamic, dtype, torch.get_num_threads())
    assert {"portable"} <= set(times) <= {name for name, d in CASES if d == dynamic}
    assert all(t > 0 for t in times.values())
    assert choose(dynamic, dtype, CPU).name == min(times, key=times.get)
    rows = {name: t for name, t in times.items() if not usable(name).packs}
    assert choose(dynamic, dtype, CPU, packing=False).name == min(rows, key=rows.get)


def test_a_name_is_taken_for_the_product_that_it_computes():
    for name, dynamic in CASES:
        if isinstance(usable(name), str):
            continue
        assert choose(dynamic, torch.float32, CPU, name).name == name
        assert check_kernel(name, dynamic).name == name
        if (name, not dynamic) not in CASES:
            assert choose(not dynamic, torch.float32, CPU, name).name in {n for n, d in CASES if d != dynamic}
            with pytest.raises(InvalidParameter, match=f"kernel='{name}' is not possible with activations"):
                check_kernel(name, not dynamic)
    assert not choose(True, torch.float32, CPU, "fbgemm", packing=False).packs


@pytest.mark.parametrize("name", ["cublas", "", 5, None, ["portable"], True])
def test_unknown_names(name: object):
    with pytest.raises(InvalidParameter, match="kernel"):
        check_kernel(name)


# -- the compiler -----------------------------------------------------------------------------------------------------

PROGRAM = """
import torch
torch.set_num_threads(1)
from minfer_lib import NaiveEngine, SamplingParams, describe_int8, load_model, quantize_int8
from minfer_lib.quant.products import usable
lm = quantize_int8(load_model("tiny-random", device="cpu"), calibration=[[1, 2, 3]], progress=False)
output = NaiveEngine(lm).generate([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))[0]
assert len(output.token_ids) == 3
print(sorted(describe_int8(lm).kernels))
print(usable("compiled"))
"""
LOADS = "from minfer_lib.quant.products import usable\nprint(type(usable('compiled')).__name__)"
needs_compiler = pytest.mark.skipif(isinstance(usable("compiled"), str), reason="no compiler here")


def start(tmp_path: Path, program: str, **variables: str) -> subprocess.Popen:
    environment = {**os.environ, "MINFER_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])} | variables
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def result(process: subprocess.Popen) -> list[str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-2000:]
    return out.splitlines()


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


def test_without_a_compiled_kernel_the_model_still_works(tmp_path: Path):
    kernels, reason = result(start(tmp_path, PROGRAM, MINFER_CC=script(tmp_path / "fails", "exit 1")))
    assert "compiled" not in kernels and "fails` failed" in reason


@needs_compiler
def test_two_processes_may_compile_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    running = [start(tmp_path, LOADS) for _ in range(2)]
    assert [result(process) for process in running] == [["Compiled"], ["Compiled"]]
    kernels = tmp_path / "cache" / "kernels"
    mark, made = sorted(kernels.iterdir(), key=lambda path: path.suffix)
    assert (mark.suffix, made.suffix) == (".sha256", ".so")
    monkeypatch.setenv("MINFER_CACHE", str(tmp_path / "cache"))
    before = made.stat().st_mtime_ns
    assert compiled.library.__wrapped__().int8_dynamic  # the next one finds it
    assert made.stat().st_mtime_ns == before and {*kernels.iterdir()} == {mark, made}
    made.unlink()
    made.write_bytes(b"")  # a damaged one is passed over
    assert compiled.library.__wrapped__().int8_dynamic


@needs_compiler
def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path):
    (tmp_path / "cache").write_text("a file stands where the folder should be")
    assert result(start(tmp_path, LOADS)) == ["Compiled"]
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]  # nothing is left behind
