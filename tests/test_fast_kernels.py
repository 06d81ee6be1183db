"""The Triton kernels of the fast path against their torch versions: on the GPU, else interpreted on the CPU.

As in test_paged_triton.py, on a CPU the tests run in a process of their own with TRITON_INTERPRET=1.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
HERE = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"

if not HERE:

    def test_interpreted_in_a_process_of_its_own():
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:nbval"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, str(Path(__file__).resolve())],
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).resolve().parents[1],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        assert " passed" in done.stdout

    KINDS = {"b": "*bf16", "i": "*i8", "f": "*fp32", "d": "*fp64", "l": "*i64", "n": "*i32", "s": "i32", "e": "fp32"}
    PRODUCT = dict(HAS_BIAS=True, ADD=False, GATED=False)
    GATED = dict(HAS_BIAS=False, ADD=False, GATED=True)
    ROWS = dict(BLOCK_N=64, BLOCK_M=64, BLOCK_K=64, SPLIT=False, DOT_DTYPE="bf16")
    SPLIT = dict(BLOCK_N=32, BLOCK_M=16, BLOCK_K=128, SPLIT=True, DOT_DTYPE="bf16")
    ROPE = dict(HEADS=16, KV_HEADS=8, DIM=128, PADDED=64, BLOCK=4, NORM=True)

    # fmt: off
    @pytest.mark.parametrize(("kernel", "kinds", "constants", "warps"), [
        ("matvec.matvec_kernel", "bbbbss", PRODUCT | dict(BLOCK_N=2, BLOCK_K=512, VECTOR=8), 2),
        ("matvec.matvec_kernel", "bbbbss", GATED | dict(BLOCK_N=1, BLOCK_K=512, VECTOR=8), 2),
        ("matvec.matvec8_kernel", "bifbbsse", PRODUCT | dict(BLOCK_N=8, BLOCK_K=2048, COUNTED=True), 8),
        ("matvec.matvec8_kernel", "bifbbsse", GATED | dict(BLOCK_N=4, BLOCK_K=512, COUNTED=True), 2),
        ("few_rows.few_rows_kernel", "bbbbfnssss", PRODUCT | SPLIT, 2),
        ("few_rows.few_rows_kernel", "bbbbfnssss", GATED | ROWS, 4),
        ("fused_parts.rms_norm_kernel", "bbbse", dict(BLOCK=4096), 8),
        ("fused_parts.silu_mul_kernel", "bbs", dict(BLOCK=1024), 4),
        ("fused_parts.rope_cache_kernel", "bbbbblbbbe", ROPE, 1),
        ("fused_parts.write_cache_kernel", "bblbbssss", dict(KV_HEADS=8, KEY_DIM=128, VALUE_DIM=128, BLOCK=1024), 4),
        ("sampling.scan_kernel", "bffndss", dict(BLOCK=4096), 4),
        ("sampling.draw_kernel", "bfdfndlsss", dict(BLOCK=4096, PARTS=64), 4),
        ("step_inputs.step_inputs_kernel", "nnnnlnlllnnsss", dict(BLOCK_SIZE=16, TILE=128), 1),
    ], ids=lambda value: value if isinstance(value, str) and "." in value else "")  # fmt: skip
    def test_it_compiles_for_hopper(kernel, kinds, constants, warps):
        """With the constants of a 7B: what only the interpreter takes is found without a GPU."""
        import importlib

        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile
        from triton.language import bfloat16

        module, name = kernel.split(".")
        function = getattr(importlib.import_module(f"minfer_lib.kernels.triton.{module}"), name)
        constants = {k: bfloat16 if v == "bf16" else v for k, v in constants.items()}
        numbers = [argument for argument in function.arg_names if argument not in constants]
        assert len(numbers) == len(kinds)
        signature = {argument: KINDS[kind] for argument, kind in zip(numbers, kinds, strict=True)}
        source = ASTSource(
            fn=function, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants
        )
        compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=warps))
        assert "spill" not in compiled.asm["ptx"] and compiled.metadata.shared < 228 * 1024

else:
    from minfer_lib.fast import sampling as reference_sampling
    from minfer_lib.generation.params import SamplingParams
    from minfer_lib.generation.sampling import Sampler, uniform
    from minfer_lib.kernels import reference_parts, reference_step
    from minfer_lib.kernels.products import plan_product
    from minfer_lib.kernels.triton import fused_parts, sampling, step_inputs
    from minfer_lib.kernels.triton.few_rows import few_rows, scratch
    from minfer_lib.kernels.triton.matvec import matvec

    DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.float16, torch.bfloat16]
    G = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=G) * scale).to(dtype).to(DEVICE)

    def close(got: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, size: float = 1.0) -> None:
        allowed = 3e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        error = (got.double() - right.double()).abs().max() / right.double().abs().max().clamp_min(1e-6)
        assert got.dtype == dtype and error <= allowed * size, float(error)

    def right_product(x, weight, scale, bias, gated, add_to):
        w = weight.double() if scale is None else weight.double() * scale.double()[:, None]
        y = x.double() @ w.T + (0 if bias is None else bias.double())
        if gated:
            gate, up = y.chunk(2, -1)
            y = gate * gate.sigmoid() * up
        return y if add_to is None else y + add_to.double()

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        ("gated", "add", "bias"), [(False, False, False), (True, False, True), (False, True, True)]
    )
    @pytest.mark.parametrize(("n", "k"), [(1, 8), (13, 24), (64, 520), (130, 2056)])
    def test_one_row(n, k, gated, add, bias, dtype):
        for int8 in (False, True):
            rows = n * (2 if gated else 1)
            weight = (
                torch.randint(-127, 128, (rows, k), generator=G, dtype=torch.int8).to(DEVICE)
                if int8
                else random(rows, k, dtype=dtype)
            )
            scale = torch.rand(rows, generator=G).to(DEVICE) / 50 if int8 else None
            x, b = random(1, k, dtype=dtype), random(rows, dtype=dtype) if bias else None
            out = random(1, n, dtype=dtype) if add else None
            right = right_product(x, weight, scale, b, gated, out)
            for plan in [(1, 2), (2, 2), (4, 4), (8, 8), plan_product(1, rows, k, weight.dtype, gated)]:
                kept = None if out is None else out.clone()
                got = matvec(x, weight, scale, b, gated=gated, add_to=kept, plan=plan)
                assert kept is None or got is kept
                close(got, right, dtype, 2)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        ("gated", "add", "bias"), [(False, False, False), (True, False, True), (False, True, True)]
    )
    @pytest.mark.parametrize(("m", "n"), [(2, 33), (5, 64), (17, 70), (64, 130)])
    def test_few_rows(m, n, gated, add, bias, dtype):
        k, rows = 512, n * (2 if gated else 1)
        x, weight = random(m, k, dtype=dtype), random(rows, k, dtype=dtype)
        b, out = random(rows, dtype=dtype) if bias else None, random(m, n, dtype=dtype) if add else None
        right = right_product(x, weight, None, b, gated, out)
        for splits in (1,) if gated else (1, 2, 4):
            kept = None if out is None else out.clone()
            got = few_rows(
                x, weight, b, gated=gated, add_to=kept, plan=(32, 64 if dtype == torch.float32 else 128, 2, 2, splits)
            )
            close(got, right, dtype, 60 if dtype == torch.float32 and DEVICE == "cuda" else 2)  # tf32 there
        assert not scratch(torch.device(DEVICE, 0 if DEVICE == "cuda" else None), 1)[1].any(), "tickets are left"

    def test_scratch_stays_where_it_is():
        device = torch.device("cpu")
        partial, tickets = scratch(device, 10)
        place = partial.data_ptr()
        larger, same = scratch(device, partial.numel() + 1)
        assert larger.data_ptr() != place and same is tickets and scratch(device, 10)[0] is larger
        assert partial.data_ptr() == place

    def test_what_no_kernel_of_ours_is_for():
        assert plan_product(2, 4608, 3584, torch.float32, False) is None  # would be rounded to tf32
        assert (
            plan_product(8, 4608, 3600, torch.bfloat16, False) is None
            and plan_product(65, 64, 128, torch.bfloat16, True) is None
        )
        assert plan_product(1, 64, 12, torch.int8, False) is None

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 7), (2, 64), (1, 3584)])
    def test_norm_and_silu(rows, n, dtype):
        x, gain = random(rows, n, dtype=dtype), random(n, dtype=dtype)
        close(fused_parts.rms_norm(x, gain, 1e-6), reference_parts.rms_norm(x, gain, 1e-6), dtype)
        both = random(rows, 2 * n, dtype=dtype, scale=4.0)
        close(fused_parts.silu_mul(both), reference_parts.silu_mul(both), dtype)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("norm", [False, True])
    @pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dim"), [(1, 4, 2, 16), (5, 7, 1, 48), (70, 9, 3, 64)])
    def test_rotary_embedding_and_cache(tokens, heads, kv_heads, dim, norm, dtype):
        qkv = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
        angles = torch.rand(tokens, dim // 2, generator=G).repeat(1, 2)
        cos, sin = angles.cos().to(dtype).to(DEVICE), angles.sin().to(dtype).to(DEVICE)
        gains = (random(dim, dtype=dtype), random(dim, dtype=dtype)) if norm else (None, None)
        slots = torch.randperm(tokens + 9, generator=G)[:tokens].to(DEVICE)
        pools = [[torch.full((tokens + 9, kv_heads, dim), 7.0, dtype=dtype, device=DEVICE) for _ in "kv"] for _ in "ab"]
        got, right = (
            part.rope_cache(qkv, cos, sin, *gains, slots, *pool, 1e-5, heads, kv_heads)
            for part, pool in zip((fused_parts, reference_parts), pools, strict=True)
        )
        close(got, right, dtype)
        for one, other in zip(*pools, strict=True):
            close(one, other, dtype)

    def test_keys_and_values_of_different_sizes_and_any_strides():
        key, value = random(3, 6, 8).transpose(0, 1), random(3, 6, 5).transpose(0, 1)  # [6, 3, dim]
        slots = torch.tensor([4, 9, 0, 7, 2, 5], device=DEVICE)
        keys, values = torch.zeros(10, 3, 8, device=DEVICE), torch.zeros(10, 3, 5, device=DEVICE)
        fused_parts.write_cache(key, value, slots, keys, values)
        assert torch.equal(keys[slots], key) and torch.equal(values[slots], value)
        assert not keys[[1, 3, 6, 8]].any() and not values[[1, 3, 6, 8]].any()

    def test_step_inputs():
        tables = torch.randint(0, 50, (6, 9), generator=G, dtype=torch.int32).to(DEVICE)

        def numbers(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        chosen = torch.tensor([100, -1, 300], device=DEVICE)
        given = numbers(-1, 2, 0, 1, -1), numbers(7, 0, 0, 0, 9), numbers(0, 5, 35, 8, -1), numbers(3, 1, 5, 0, 0)
        got = step_inputs.step_inputs(*given, chosen, tables, 4, 999)
        right = reference_step.step_inputs(*given, chosen, tables, 4, 999)
        assert [part.tolist() for part in got] == [part.tolist() for part in right]
        assert [part.dtype for part in got] == [part.dtype for part in right]
        ids, positions, slots, lengths, _ = got
        assert ids.tolist() == [7, 300, 100, 0, 9]  # a row that goes on from no token computes something
        assert (positions[-1], slots[-1], lengths[-1]) == (0, 999, 0)
        assert slots[2] == tables[5, 8] * 4 + 3

    ROWS = 40

    @pytest.mark.parametrize("kind", ["random", "peaked", "flat", "ties", "banned", "half"])
    @pytest.mark.parametrize("vocab", [1, 17, 4096, 4097, 20_000])
    def test_draws_are_those_of_the_sampler(vocab, kind):
        logits = random(ROWS, vocab, scale={"peaked": 20.0, "flat": 0.01}.get(kind, 2.0))
        if kind == "ties":
            logits = logits.round()
        if kind == "banned":
            logits[torch.rand(ROWS, vocab, generator=G).to(DEVICE) < 0.9] = -torch.inf
            logits[:, vocab // 2] = 0.5
        if kind == "half":
            logits = logits.bfloat16()
        temperatures = [0.0, 1e-9, 0.3, 1.0, 5.0] * (ROWS // 5)
        params = [SamplingParams(temperature=t, seed=i) for i, t in enumerate(temperatures)]

        class Row:
            def __init__(self, i: int) -> None:
                self.params, self.seed, self.index, self.prompt_token_ids, self.token_ids = params[i], i, 0, [], [0] * i

        wanted = Sampler()(logits, [Row(i) for i in range(ROWS)]).token_ids
        u = uniform(range(ROWS), [0] * ROWS, range(ROWS)).to(DEVICE)
        told = torch.tensor([max(t, 1e-6) if t else 0.0 for t in temperatures], device=DEVICE)
        for sample in (sampling.sample, reference_sampling.sample):
            out = torch.full((ROWS,), -7, device=DEVICE)
            sample(logits, told, u, out)
            assert sum(a != b for a, b in zip(out.tolist(), wanted, strict=True)) <= (1 if vocab > 4097 else 0)
            alone = torch.full((1,), -7, device=DEVICE)
            sample(logits[3:4], told[3:4], u[3:4], alone)
            assert alone[0] == out[3]

    def test_a_point_on_the_very_end_is_a_token_that_has_a_probability():
        logits = torch.full((4, 9000), -torch.inf, device=DEVICE)
        logits[:, 100], logits[:, 5000] = 1.0, 1.0
        u = torch.tensor([0.0, 0.4999, 0.5001, 1 - 2**-53], dtype=torch.float64, device=DEVICE)
        out = torch.zeros(4, dtype=torch.int64, device=DEVICE)
        sampling.sample(logits, torch.ones(4, device=DEVICE), u, out)
        assert out.tolist() == [100, 100, 5000, 5000]

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    def test_what_is_not_a_number_is_told(bad):
        logits = random(4, 5000)
        logits[1] = -torch.inf if bad == -torch.inf else logits[1]
        logits[1, 4500] = bad
        for temperature in (0.0, 0.8):
            for sample in (sampling.sample, reference_sampling.sample):
                out = torch.zeros(4, dtype=torch.int64, device=DEVICE)
                u = torch.full((4,), 0.3, dtype=torch.float64, device=DEVICE)
                sample(logits, torch.full((4,), temperature, device=DEVICE), u, out)
                assert out[1] == -1 and (out[[0, 2, 3]] >= 0).all()

    def test_filtered_rows_beside_greedy_ones():
        logits = random(6, 300, scale=3.0)
        filters = [dict(temperature=0.8, top_k=3), {}, dict(top_p=0.5), dict(min_p=0.2), dict(temperature=2.0), {}]
        params = [SamplingParams(**({"temperature": 1.0} | each)) if each else SamplingParams() for each in filters]

        class Row:
            def __init__(self, i: int) -> None:
                self.params, self.seed, self.index, self.prompt_token_ids, self.token_ids = params[i], i, 0, [], [0] * i

        wanted = Sampler()(logits, [Row(i) for i in range(6)]).token_ids
        u = uniform(range(6), [0] * 6, range(6)).to(DEVICE)
        out = torch.zeros(6, dtype=torch.int64, device=DEVICE)
        assert reference_sampling.sample_filtered(logits, params, u, out).tolist() == wanted
