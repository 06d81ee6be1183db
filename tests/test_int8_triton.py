"""The Triton kernels of the int8 product, against a float64 reference: on the GPU, else interpreted on the CPU.

Triton decides at its import whether it interprets, for the whole process, so on a CPU the tests run in a process of
their own: the one test that pytest finds there starts pytest on this file again with TRITON_INTERPRET=1.
"""

import re

import pytest
import torch
from interpreted import DEVICE, HERE, run_interpreted

pytest.importorskip("triton")

if not HERE:

    def test_interpreted_in_a_process_of_its_own():
        run_interpreted(__file__)

    @pytest.mark.parametrize("dtype", ["bf16", "fp16"])
    @pytest.mark.parametrize("block_m, block_k", [(64, 128), (128, 64), (256, 64)])
    def test_a_step_waits_for_the_tensor_cores_of_hopper(block_m, block_k, dtype):
        """Compiled for an H100 without one: every wait is for all of the products that were started, not for some.

        A wrong product is a matter of luck on the GPU; that nothing waits for it can be read in the program.
        """
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile
        from triton.language import bfloat16, float16

        from minfer_lib.kernels.triton.int8_products import dot_kernel

        pointers = {"x": dtype, "weight": "i8", "scale_ptr": "fp32", "bias_ptr": dtype, "out_ptr": dtype}
        constants = dict(BLOCK_N=64, BLOCK_M=block_m, BLOCK_K=block_k, MASK_K=False, HAS_BIAS=False, PARTIAL=False)
        constants |= dict(DOT_DTYPE={"bf16": bfloat16, "fp16": float16}[dtype], COPY_ENGINE=False, ASYNCHRONOUS=True)
        names = dot_kernel.arg_names
        types = {name: "*" + pointers[name] if name in pointers else "i32" for name in names if name not in constants}
        source = ASTSource(
            fn=dot_kernel,
            signature=types | dict.fromkeys(constants, "constexpr"),
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, "n", "k", "k_per_split")},
        )
        compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 3})
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        waits = re.findall(r"wgmma\.wait_group\S*\s+(\d+)", compiled.asm["ptx"])
        assert waits and set(waits) == {"0"}

else:
    from minfer_lib.errors import InvalidParameter
    from minfer_lib.kernels.triton import int8_linear as kernels
    from minfer_lib.kernels.triton.device import GPU, gpu_of
    from minfer_lib.kernels.triton.int8_linear import ProductPlan, dequantize, int8_linear, plan_product

    MATVEC = ProductPlan("matvec", block_n=16, block_k=128)
    DOT = ProductPlan("dot", block_n=64, block_m=16, block_k=64, stages=2)
    SPLIT = ProductPlan("dot", block_n=64, block_m=16, block_k=64, splits=3, stages=2)
    WIDE = ProductPlan("dot", block_n=64, block_m=64, block_k=128, stages=2)
    COPIED = ProductPlan("dot", block_n=64, block_m=64, block_k=128, splits=2, copy_engine=True)
    LARGE = ProductPlan("dot", block_n=64, block_m=256, block_k=64, copy_engine=True)
    DEQUANTIZE = ProductPlan("dequantize")
    # What rounding to a dtype may change, relatively; Triton's interpreter cuts float32 off to bfloat16 instead.
    EPS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8 if DEVICE == "cuda" else 2.0**-7}

    def name(plan):
        return "own" if plan is None else f"{plan.path}-{plan.block_m}-{plan.splits}" + "-copied" * plan.copy_engine

    def make(m, n, k, dtype=torch.float32, bias=True, seed=0):
        """x [m, k], weight [n, k], scale [n], bias [n] or None; scales over four decades, as channels have."""
        g = torch.Generator().manual_seed(seed + 1000 * m + 100 * n + k)
        x = torch.randn(m, k, generator=g).to(dtype)
        weight = torch.randint(-127, 128, (n, k), generator=g, dtype=torch.int8)
        scale = 10 ** (torch.rand(n, generator=g) * 4 - 5)
        b = torch.randn(n, generator=g).to(dtype) if bias else None
        return [None if part is None else part.to(DEVICE) for part in (x, weight, scale, b)]

    def assert_right(out, x, weight, scale, bias, rounded_weights=False):
        """Within what the arithmetic may lose, element by element, of the product in float64.

        A float32 sum of k products is off by at most k * 2**-24 of the sum of their magnitudes in any order, and by
        about the root of that as a rule; 8 * sqrt(k) is allowed. The result is rounded once more, to its dtype. On the
        dequantize path the weights have been rounded to that dtype, exactly as here, and cuBLAS may round some partial
        sums to it as well (four of them, each of four standard deviations: 641 rows of k = 1000 show two).
        """
        w, eps = weight.double() * scale.double()[:, None], EPS[x.dtype]
        if rounded_weights:
            w = (weight.float() * scale[:, None]).to(x.dtype).double()
        b = torch.zeros_like(scale, dtype=torch.float64) if bias is None else bias.double()
        right, size = x.double() @ w.T + b, x.double().abs() @ w.abs().T + b.abs()
        allowed = size * 2.0**-24 * (8 * x.shape[1] ** 0.5 + 8) + right.abs() * eps * 1.01
        allowed += 2.0**-25 * (x.dtype == torch.float16)
        if rounded_weights:
            allowed += 16 * eps * (x.double() ** 2 @ (w**2).T + b**2).sqrt()
        assert out.dtype == x.dtype and out.shape == right.shape and out.device == x.device
        error = (out.double() - right).abs()
        assert bool((error <= allowed).all()), float((error / allowed).max())

    @pytest.mark.parametrize("k", [1, 31, 64, 100, 129, 577])
    @pytest.mark.parametrize("n", [1, 5, 64, 129, 577])
    def test_sizes_that_no_block_divides(n, k):
        for m, plan in ((1, MATVEC), (3, SPLIT), (17, WIDE), (7, DEQUANTIZE)):
            parts = make(m, n, k, bias=(n + k) % 2 == 0)
            assert_right(int8_linear(*parts, plan=plan), *parts)

    @pytest.mark.parametrize("plan", [None, DOT, SPLIT, COPIED, DEQUANTIZE], ids=name)
    @pytest.mark.parametrize("m", [1, 2, 3, 7, 16, 17, 33, 64, 65, 130])
    def test_rows(m, plan):
        parts = make(m, 69, 144 if plan is COPIED else 131)
        assert_right(int8_linear(*parts, plan=plan), *parts)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("plan", [MATVEC, DOT, SPLIT, WIDE, COPIED, LARGE, DEQUANTIZE], ids=name)
    def test_half_precisions(dtype, plan):
        for n, k in ((100, 129), (64, 256)):
            parts = make(1 if plan is MATVEC else 19, n, k, dtype)
            assert_right(int8_linear(*parts, plan=plan), *parts, rounded_weights=plan is DEQUANTIZE)

    def test_all_codes_are_exact():
        """Every int8 code times a power of two, in every dtype and on every path: no rounding anywhere, so equality."""
        weight = torch.arange(-128, 128, dtype=torch.int8, device=DEVICE)[:, None].repeat(1, 16)
        scale = torch.full((256,), 2.0**-7, device=DEVICE)
        x = torch.zeros(2, 16, device=DEVICE)
        x[0, 3], x[1, 15] = 1.0, -2.0
        right = torch.stack([weight[:, 3] / 128, weight[:, 15] / -64])
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for plan in (DOT, SPLIT, DEQUANTIZE):
                assert torch.equal(int8_linear(x.to(dtype), weight, scale, plan=plan).float(), right), (dtype, plan)
            assert torch.equal(int8_linear(x[:1].to(dtype), weight, scale, plan=MATVEC).float(), right[:1]), dtype

    @pytest.mark.parametrize("path", ["matvec", "dot", "split", "dequantize"])
    def test_strides_of_x(path):
        plan = {"matvec": MATVEC, "dot": DOT, "split": SPLIT, "dequantize": DEQUANTIZE}[path]
        m = 1 if path == "matvec" else 5
        _, weight, scale, bias = make(m, 40, 70)
        big = torch.randn(70, 40, 3, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        for x in (big[:, :m, 0].T, big[:m, :, :].reshape(m, -1)[:, 1:71], big[0, 0, 0].expand(m, 70)):
            assert_right(int8_linear(x, weight, scale, bias, plan=plan), x, weight, scale, bias)

    def test_zero_rows_of_the_weight_and_no_rows_of_x():
        x, weight, scale, bias = make(4, 33, 50)
        weight[7], scale[7] = 0, 1.0
        for plan in (DOT, SPLIT, DEQUANTIZE, None):
            out = int8_linear(x, weight, scale, plan=plan)
            assert bool((out[:, 7] == 0).all()) and bool((out[:, 8] != 0).any())
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            out = int8_linear(x[:0].to(dtype), weight, scale, bias)
            assert out.shape == (0, 33) and out.dtype == dtype

    @pytest.mark.parametrize("plan", [DOT, DEQUANTIZE], ids=["dot", "dequantize"])
    def test_float16_does_not_overflow_where_the_result_fits(plan):
        """3000 products of about 127 * 10 add up to far more than float16 holds; times the scale they fit."""
        x = torch.full((3, 3000), 10.0, dtype=torch.float16, device=DEVICE)
        weight = torch.full((8, 3000), 127, dtype=torch.int8, device=DEVICE)
        scale = torch.full((8,), 1e-3, device=DEVICE)
        out = int8_linear(x, weight, scale, plan=plan)
        torch.testing.assert_close(
            out.double(), torch.full((3, 8), 3810.0, dtype=torch.float64, device=DEVICE), rtol=2e-3, atol=0
        )

    def test_equal_inputs_give_equal_bits():
        for plan in (DOT, SPLIT, WIDE, DEQUANTIZE):
            parts = make(6, 70, 200)
            first = int8_linear(*parts, plan=plan)
            assert all(torch.equal(first, int8_linear(*parts, plan=plan)) for _ in range(3))

    def test_a_row_past_the_end_is_never_written():
        """The result lies inside a larger buffer of NaN; what surrounds it must still be NaN."""
        for plan in (MATVEC, DOT, SPLIT):
            x, weight, scale, bias = make(1 if plan is MATVEC else 3, 37, 90)
            buffer = torch.full((5, 37), torch.nan, device=DEVICE)
            out = buffer[1 : 1 + len(x)]
            kernels._launch(x, weight, scale, bias, out, plan)
            assert_right(out, x, weight, scale, bias)
            assert bool(buffer[0].isnan().all()) and bool(buffer[1 + len(x) :].isnan().all())

    def test_the_workspace_is_small_and_slices_meet(monkeypatch):
        parts = make(5, 45, 64)
        monkeypatch.setattr(kernels, "WORKSPACE_BYTES", 64 * 4 * 7 + 3)  # 7 rows at a time: 45 is no multiple of it
        sizes = []
        real = kernels.dequantize
        monkeypatch.setattr(kernels, "dequantize", lambda w, s, out: sizes.append(out.numel() * 4) or real(w, s, out))
        assert_right(int8_linear(*parts, plan=DEQUANTIZE), *parts)
        assert len(sizes) == 7 and max(sizes) <= kernels.WORKSPACE_BYTES

    def test_dequantize():
        _, weight, scale, _ = make(1, 9, 2500)
        out = dequantize(weight, scale, torch.empty(9, 2500, device=DEVICE))
        assert torch.equal(out, weight.float() * scale[:, None])

    @pytest.mark.parametrize("hopper", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_plans_fit_the_gpu(dtype, hopper):
        """One row goes to the matrix-vector kernel alone, and no tile needs more shared memory than its GPU has."""
        gpu = GPU(sms=132, shared_memory=(227 if hopper else 64) * 1024, hopper=hopper)
        for m in (1, 2, 16, 17, 32, 33, 64, 65, 128, 384, 385, 512, 513, 640, 641, 1024, 1025, 5000):
            for n, k in ((1, 1), (512, 3584), (3584, 18944), (152064, 3584), (576, 1536)):
                plan = plan_product(m, n, k, dtype, gpu)
                assert (plan.path == "matvec") == (m == 1)
                if plan.path == "dot":
                    tiles = plan.stages * plan.block_k * (plan.block_n + plan.block_m * dtype.itemsize)
                    assert tiles <= gpu.shared_memory
                    assert 1 <= plan.splits <= max(1, k // 512)

    @pytest.mark.parametrize(
        "change",
        [
            dict(x=lambda t: t.double()),
            dict(x=lambda t: t[0]),
            dict(x=lambda t: t[:, :49]),
            dict(weight=lambda t: t.float()),
            dict(weight=lambda t: t.T.contiguous().T),
            dict(scale=lambda t: t.half()),
            dict(scale=lambda t: t[:-1]),
            dict(bias=lambda t: t[:-1]),
            dict(bias=lambda t: t.repeat_interleave(2)[::2]),
            dict(scale=lambda t: t.to("meta")),
        ],
    )
    def test_what_would_be_read_beyond_its_end_is_refused(change):
        parts = dict(zip(("x", "weight", "scale", "bias"), make(4, 33, 50), strict=True))
        parts.update({name: f(parts[name]) for name, f in change.items()})
        with pytest.raises(InvalidParameter, match="it takes x"):
            int8_linear(**parts)

    @pytest.mark.skipif(DEVICE == "cpu", reason="what goes wrong at times only goes wrong on the GPU")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize(
        "n, k", [(3584, 3584), (512, 3584), (18944, 3584), (3584, 18944), (576, 1536), (577, 1000), (100, 133)]
    )
    def test_every_plan_gives_the_same_right_bits_again_and_again(n, k, dtype):
        """The layers of a 7B model and some odd ones, with rows on both sides of every border between two plans."""
        _, weight, scale, bias = make(1, n, k, dtype)
        plans = set()
        for m in (1, 2, 9, 16, 17, 32, 33, 48, 64, 65, 128, 200, 256, 384, 385, 512, 513, 640, 641, 1024, 1025, 2048):
            plans.add(plan := plan_product(m, n, k, dtype, gpu_of(weight.device)))
            for seed in range(2):
                g = torch.Generator(DEVICE).manual_seed(seed)
                x = torch.randn(m, k, generator=g, device=DEVICE).to(dtype)
                first = int8_linear(x, weight, scale, bias)
                assert_right(first, x, weight, scale, bias, rounded_weights=plan.path == "dequantize")
                for _ in range(10):
                    assert torch.equal(first, int8_linear(x, weight, scale, bias)), (m, plan)
        assert len({plan.path for plan in plans}) == (3 if k % 16 == 0 or dtype == torch.float32 else 2)

    @pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs and more than 2**31 weights need the GPU")
    def test_graph_replay_and_64_bit_offsets():
        x, weight, scale, bias = make(8, 512, 3584, torch.bfloat16)
        int8_linear(x, weight, scale, bias)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = int8_linear(x, weight, scale, bias)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, int8_linear(x, weight, scale, bias))
        n, k = 2**17 + 3, 2**14 + 16  # 2.15e9 weights
        weight = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=DEVICE)
        scale = torch.rand(n, device=DEVICE) + 0.1
        for m in (1, 9, 300):
            x = torch.randn(m, k, device=DEVICE)
            out = int8_linear(x, weight, scale)
            assert_right(out[:, -8:], x, weight[-8:], scale[-8:], None)
