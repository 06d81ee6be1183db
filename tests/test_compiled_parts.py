"""The C kernels of a CPU's fast path against torch: products of all kinds, the norm, the rotary embedding.

The fast path as a whole is tested in test_fast.py, where batches are filled up as on a GPU; here they are not.
"""

import ctypes
import itertools
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from engines import MIX, answers, each, tokens

from minfer_lib import LLMEngine, SamplingParams
from minfer_lib.cache.pool import KVPool, LayerShape
from minfer_lib.kernels import compiled, compiled_parts, compiled_products, reference_parts
from minfer_lib.kernels.compiled_products import compiled_product
from minfer_lib.kernels.products import product
from minfer_lib.quant.products import token_codes

EXACT_ROWS = True
FUSED = ("llama", "mistral", "qwen2", "qwen3")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
C = Path(compiled.__file__).parent / "c"
needs_kernels = pytest.mark.skipif(compiled_parts.why_not() is not None, reason=str(compiled_parts.why_not()))


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def codes_of(n: int, k: int) -> torch.Tensor:
    return torch.randint(-64, 65, (n, k), generator=torch.Generator().manual_seed(1), dtype=torch.int8)


def close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((got.double() - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max())


def arguments(kind: str, n: int, k: int, dtype: torch.dtype, bias: bool) -> dict[str, torch.Tensor | None]:
    if kind == "floats":
        return {"weight": randn(n, k, seed=1).to(dtype), "bias": randn(n, seed=2).to(dtype) if bias else None}
    codes = codes_of(n, k)
    found = {"weight": codes, "scale": randn(n, seed=3).abs() + 0.01, "bias": randn(n, seed=2) if bias else None}
    if kind == "dynamic":
        found["sums"] = (128 * codes.sum(1, dtype=torch.int64)).to(torch.int32)
        found["smoothing"] = randn(k, seed=4).abs() + 0.5 if bias else None
    return found


def wanted_of(x: torch.Tensor, given: dict[str, torch.Tensor | None]) -> torch.Tensor:
    """In float64."""
    rows = x.double()
    if given.get("sums") is not None:
        codes, scale = token_codes(x.float(), given["smoothing"])
        rows = codes.double() * scale.double()
    y = rows @ given["weight"].double().T
    y = y if given.get("scale") is None else y * given["scale"].double()
    return y if given["bias"] is None else y + given["bias"].double()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["floats", "dynamic", "weight-only"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 3), (3, 0), (6, 64), (37, 129), (38, 577), (64, 256), (96, 1)])
def test_products(kind: str, n: int, k: int, dtype: torch.dtype):
    for m, bias in itertools.product((1, 2, 3, 4, 6, 131), (False, True)):
        x, given = randn(m, k).to(dtype), arguments(kind, n, k, dtype, bias)
        wanted = wanted_of(x, given)
        assert close(compiled_product(x, **given), wanted, dtype)
        residual = randn(m, n, seed=5).to(dtype)
        added = compiled_product(x, **given, add_to=residual.clone())
        assert close(added, residual.double() + wanted, dtype)
        if n % 2 == 0:
            gate, up = wanted.chunk(2, -1)
            assert close(compiled_product(x, **given, gated=True), torch.nn.functional.silu(gate) * up, dtype)


@needs_kernels
@pytest.mark.parametrize("kind", ["floats", "dynamic", "weight-only"])
def test_company_changes_no_bit_of_a_row(kind: str):
    x, given = randn(9, 577).bfloat16(), arguments(kind, 38, 577, torch.bfloat16, True)
    together = compiled_product(x, **given, gated=True)
    alone = torch.cat([compiled_product(row[None], **given, gated=True) for row in x])
    assert torch.equal(together, alone)


@needs_kernels
@pytest.mark.parametrize("kind", ["floats", "dynamic", "weight-only"])
def test_what_is_not_finite_stays_visible_and_in_its_row(kind: str):
    x, given = randn(3, 64), arguments(kind, 8, 64, torch.float32, False)
    x[1, 7] = torch.inf
    out = compiled_product(x, **given)
    assert not out[1].isfinite().any() and out[[0, 2]].isfinite().all()
    out = compiled_product(torch.full_like(x, 1e4), **given | {"scale": given.get("scale")}, gated=True)
    assert out.isfinite().all()  # SiLU of large negative numbers


@needs_kernels
def test_dtypes_that_differ_are_brought_together():
    x = randn(3, 64).bfloat16()
    for kind in ("dynamic", "weight-only", "floats"):
        given = arguments(kind, 8, 64, torch.float32, True)
        given["bias"] = given["bias"].bfloat16()
        assert close(product(x, **given), wanted_of(x, given), torch.bfloat16)
    gain = randn(64, seed=1)
    wanted = reference_parts.rms_norm(x, gain, 1e-5)
    assert torch.equal(compiled_parts.rms_norm(x, gain, 1e-5), wanted)
    weight = randn(64, 8).T
    assert close(product(x.float(), weight), x.double() @ weight.double().T, torch.float32)


@needs_kernels
def test_numbers_that_the_kernel_does_not_take_go_another_way():
    x, given = randn(3, 64).double(), arguments("weight-only", 8, 64, torch.float32, False)
    assert close(product(x, **given), wanted_of(x, given), torch.float32)
    given = arguments("dynamic", 8, 64, torch.float32, False)
    assert close(product(x, **given), wanted_of(x, given), torch.float32)


# -- the instruction sets ---------------------------------------------------------------------------------------------

ISAS = {  # what the compiler is told, and what of /proc/cpuinfo it needs
    "none": (["-march=x86-64"], ()),
    "AVX2": (["-march=haswell"], ("avx2", "fma", "f16c")),
    "AVX-512 without VNNI": (["-march=skylake-avx512"], ("avx512bw", "avx512vl")),
    "AVX-512 VNNI": (["-march=cascadelake"], ("avx512_vnni", "avx512bw")),
    "AVX-VNNI": (["-march=haswell", "-mavxvnni"], ("avx2", "avx_vnni")),
}


def run_integers(function: object) -> None:
    """Integers that float32 holds exactly, at the limits of what pairs of codes may sum up to."""
    for m, n, k in ((1, 5, 577), (4, 8, 64), (7, 4, 31), (5, 9, 1536)):
        codes = codes_of(n, k)
        codes[0] = 64
        x = torch.randint(-127, 128, (m, k), generator=torch.Generator().manual_seed(2)).float()
        x[:, 0], x[0] = 127, 127  # the scale of each row is 1
        wanted = x.double() @ codes.double().T
        for sums in (None, (128 * codes.sum(1, dtype=torch.int64)).to(torch.int32)):
            out, scale = torch.empty(m, n), torch.ones(n)
            pointers = [0 if t is None else t.data_ptr() for t in (x, out, codes, sums, scale, None, None)]
            assert function(compiled_products.CALL.pack(*pointers, m, n, k, 0, 3, False, False)) == 0
            assert torch.equal(out.double(), wanted)


@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("cc") is None, reason="needs an x86 CPU and cc")
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_has_the_same_integers(isa: str, tmp_path: Path):
    options, needed = ISAS[isa]
    flags = Path("/proc/cpuinfo").read_text().split()
    if not set(needed) <= set(flags):
        pytest.skip(f"this CPU has no {isa}")
    out = tmp_path / "products.so"
    command = ["cc", *compiled.COMMON, *options, "-shared", str(C / "products.c"), "-lm", "-o", str(out)]
    built = subprocess.run(command, capture_output=True, text=True)
    if "bad value" in built.stderr or "unrecognized" in built.stderr:
        pytest.skip(f"the compiler does not know {options}")
    assert built.returncode == 0, built.stderr
    function = ctypes.CDLL(str(out)).product
    function.argtypes = [ctypes.c_char_p]
    run_integers(function)


MAIN = """
#include <stdio.h>
#include "products.c"
int main(void) {
    enum { M = 5, N = 9, K = 100 };
    static float x[M * K], out[M * N], scale[N];
    static int8_t w[N * K];
    static int32_t sums[N];
    for (int i = 0; i < M * K; i++) x[i] = (float)((i * 37 + i / 11) % 255 - 127);
    for (int r = 0; r < M; r++) x[r * K] = 127;
    for (int i = 0; i < N * K; i++) w[i] = (int8_t)((i * 29 + i / 7) % 129 - 64);
    for (int n = 0; n < N; n++) { scale[n] = 1; for (int j = 0; j < K; j++) sums[n] += 128 * w[n * K + j]; }
    for (int dynamic = 0; dynamic < 2; dynamic++) {
        call c = {x, out, w, dynamic ? sums : NULL, scale, NULL, NULL, M, N, K, FLOAT32, INT8, 0, 0};
        if (product(&c)) return 1;
        for (int r = 0; r < M; r++) for (int n = 0; n < N; n++) {
            int wanted = 0;
            for (int j = 0; j < K; j++) wanted += (int)x[r * K + j] * w[n * K + j];
            if ((float)wanted != out[r * N + n]) { printf("%d %d %d %f\\n", r, n, wanted, out[r * N + n]); return 2; }
        }
    }
    return 0;
}
"""


@pytest.mark.parametrize("options", [["-march=armv8-a"], ["-march=armv8.2-a+dotprod"]])
def test_arm_has_the_same_integers(options: list[str], tmp_path: Path):
    """By a cross compiler and an emulator, where there are both."""
    compiler, emulator = "aarch64-linux-gnu-gcc", shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if shutil.which(compiler) is None or emulator is None:
        pytest.skip(f"{compiler} or qemu-aarch64 is not installed")
    (tmp_path / "main.c").write_text(MAIN)
    command = [compiler, *compiled.COMMON, *options, "-static", f"-I{C}", "main.c", "-lm", "-o", "main"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert subprocess.run([emulator, "-cpu", "max", "./main"], cwd=tmp_path).returncode == 0


# -- norm and rotary embedding ----------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 7), (3, 64), (40, 577), (2, 3, 96)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype):
    x, gain = randn(*shape).to(dtype), randn(shape[-1], seed=1).to(dtype)
    wanted = reference_parts.rms_norm(x, gain, 1e-5)
    assert close(compiled_parts.rms_norm(x, gain, 1e-5), wanted.double(), dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "tokens"), [(4, 2, 8, 1), (3, 1, 62, 5), (9, 3, 64, 40)])
def test_rope_cache(heads: int, kv_heads: int, dim: int, tokens: int, normed: bool, int8: bool, dtype: torch.dtype):
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    qkv[0, -dim:] = 0  # a value of zeros
    angles = randn(tokens, dim // 2, seed=1).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    gains = [randn(dim, seed=seed).to(dtype) if normed else None for seed in (2, 3)]
    slots = torch.randperm(50, generator=torch.Generator().manual_seed(4))[:tokens]
    found = []
    for parts in (reference_parts, compiled_parts):
        pool = KVPool.of(LayerShape(kv_heads, dim, dim, torch.int8 if int8 else dtype), 50, torch.device("cpu"))
        scales = pool.key_scales, pool.value_scales
        query = parts.rope_cache(qkv, cos, sin, *gains, slots, pool.keys, pool.values, 1e-6, heads, kv_heads, *scales)
        found.append((query, *pool.read(torch.arange(50), torch.float32)))
    for wanted, got in zip(*found, strict=True):
        assert (got.double() - wanted.double()).abs().max() <= (0.02 if int8 else TOLERANCE[dtype]) * wanted.abs().max()


@needs_kernels
def test_keys_and_values_in_int8_are_the_definitions_own_codes():
    """Values are kept as they are: zeros, numbers without digits for a scale, and what is not finite among them."""
    values = randn(7, 16)
    values[1], values[2], values[3, 4], values[4, 5] = 0, 1e-44, torch.nan, -torch.inf
    values[5] = torch.arange(16) - 7.5  # halves of steps
    codes, scales = reference_parts.quantize_rows(values)
    pool = KVPool.of(LayerShape(1, 16, 16, torch.int8), 9, torch.device("cpu"))
    qkv, turns = torch.cat([randn(7, 32), values], -1), torch.ones(7, 16)
    compiled_parts.rope_cache(
        qkv, turns, turns, None, None, torch.arange(7), pool.keys, pool.values, 0.0, 1, 1, pool.key_scales,
        pool.value_scales,
    )  # fmt: skip
    assert torch.equal(pool.values[:7, 0], codes)
    assert torch.equal(pool.value_scales[:7, 0].view(torch.int32).abs(), scales.view(torch.int32).abs())  # NaN is NaN


# -- the fast path of a CPU -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("kernels", ["C", "torch"])
def test_a_cpu_says_the_same_as_the_model(family, name: str, kernels: str, monkeypatch: pytest.MonkeyPatch):
    """With a C compiler and without one; requests join and leave, and batches have as many rows as there are."""
    if kernels == "torch":
        monkeypatch.setattr(compiled_parts, "why_not", lambda: "no compiler")
    elif reason := compiled_parts.why_not():
        pytest.skip(reason)
    lm = family(name)
    engine = LLMEngine(lm, "paged", block_size=4, max_model_len=64, max_num_seqs=5, fast=True)
    assert engine.fast_path.startswith(f"fused, kernels in {kernels}")
    assert tokens(engine.generate(MIX, each())) == answers(lm)
    drawn = SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True, top_k=20)
    plain = LLMEngine(lm, max_model_len=64)
    assert tokens(engine.generate(MIX, drawn)) == tokens(plain.generate(MIX, drawn))
