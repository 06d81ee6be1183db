"""The products of the fast path, against a float64 reference: on the GPU, else interpreted on the CPU.

Triton decides at its import whether it interprets, for the whole process, so on a CPU the tests run in a process of
their own: one test starts pytest on this file again with TRITON_INTERPRET=1. The others compile for an H100.
"""

import re

import pytest
import torch
from interpreted import DEVICE, HERE, run_interpreted

pytest.importorskip("triton")
HIDDEN, INTERMEDIATE, VOCABULARY, QKV = 3584, 18944, 152064, 4608  # of a 7B model

if not HERE:

    def test_interpreted_in_a_process_of_its_own():
        run_interpreted(__file__)

    def compiled(kernel, pointers, constants, unaligned=(), **options):
        """The kernel for an H100; integers are multiples of 16, as pointers are, unless named in `unaligned`."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile

        names = kernel.arg_names
        constants = {name: constants[name] for name in names if name in constants}
        types = {name: pointers.get(name, "i32") for name in names if name not in constants}
        aligned = [name for name in types if name not in unaligned]
        source = ASTSource(
            fn=kernel,
            signature=types | dict.fromkeys(constants, "constexpr"),
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        )
        return compile(source, target=GPUTarget("cuda", 90, 32), options=options)

    def ends(bias, gated, add):
        return dict(HAS_BIAS=bias, GATED=gated, ADD=add) | ({} if bias else dict(bias_ptr=None))

    @pytest.mark.parametrize("dtype, vector", [("*bf16", 8), ("*fp32", 4)])
    @pytest.mark.parametrize(
        "n, end",
        [
            (QKV, ends(True, False, False)),
            (HIDDEN, ends(False, False, True)),
            (2 * INTERMEDIATE, ends(True, True, False)),
        ],
    )
    def test_a_row_times_floats_needs_no_exchange(n, end, dtype, vector):
        """Compiled for an H100: weights come 16 bytes at a time, and no number of x goes from thread to thread."""
        from minfer_lib.kernels.triton.matvec import float_matvec_kernel, plan_matvec

        plan = plan_matvec(n, False, end["GATED"])
        constants = dict(BLOCK_N=plan.rows, BLOCK_K=32 * plan.warps * vector, VECTOR=vector) | end
        pointers = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), dtype)
        done = compiled(float_matvec_kernel, pointers, constants, num_warps=plan.warps)
        weights = [line for line in done.asm["ptx"].splitlines() if "evict_first" in line and "ld.global" in line]
        assert weights and all("v4.b32" in line for line in weights)
        loop = done.asm["ttgir"].split("scf.for")[1].split("scf.yield")[0]
        assert "convert_layout" not in loop and "local_alloc" not in loop

    @pytest.mark.parametrize("n, gated", [(HIDDEN, False), (QKV, False), (2 * INTERMEDIATE, True), (VOCABULARY, False)])
    def test_a_row_times_int8_by_a_permutation_of_bytes(n, gated):
        """Compiled for an H100, and each permutation done here: the float of every code, too large by TOO_MUCH."""
        from minfer_lib.kernels.triton.matvec import TOO_MUCH, int8_matvec_kernel, plan_matvec

        plan = plan_matvec(n, True, gated)
        constants = dict(BLOCK_N=plan.rows, BLOCK_K=256 * plan.warps, COUNTED=True) | ends(False, gated, not gated)
        pointers = dict(x_ptr="*bf16", weight_ptr="*i8", scale_ptr="*fp32", out_ptr="*bf16")
        done = compiled(int8_matvec_kernel, pointers, constants, unaligned=["eighths"], num_warps=plan.warps)
        loop = done.asm["ttgir"].split("scf.for")[1].split("scf.yield")[0]
        assert "convert_layout" not in loop and "local_alloc" not in loop
        found = re.findall(r"prmt\.b32 \S+, turned, (0x47000000), (0x\w+);", done.asm["ptx"])
        assert {int(selector, 16) >> 4 & 15 for _, selector in found} == {0, 1, 2, 3}
        four = torch.arange(-128, 128, dtype=torch.int8).view(-1, 4)  # of codes in one register
        turned = four.view(torch.uint8) ^ 0x80
        for constant, selector in found:
            constant, selector = int(constant, 16), int(selector, 16)
            sources = [*turned.unbind(1), *(torch.full((64,), constant >> 8 * i & 255) for i in range(4))]
            picked = [sources[selector >> 4 * i & 15].to(torch.uint8) for i in range(4)]
            floats = torch.stack(picked, 1).contiguous().view(torch.float32)[:, 0]
            assert torch.equal(floats - float(TOO_MUCH.value), four[:, selector >> 4 & 15].float())

    @pytest.mark.parametrize("dtype", ["bf16", "fp16"])
    @pytest.mark.parametrize(
        "m, n, k, end",
        [
            (8, HIDDEN, HIDDEN, ends(True, False, True)),
            (8, 2 * INTERMEDIATE, HIDDEN, ends(False, True, False)),
            (16, VOCABULARY, HIDDEN, ends(False, False, False)),
            (33, 2 * INTERMEDIATE, HIDDEN, ends(True, True, False)),
            (64, 2 * INTERMEDIATE, HIDDEN, ends(False, True, False)),
        ],
    )
    def test_few_rows_for_an_h100(m, n, k, end, dtype):
        """It fits; Hopper's matrix instruction, which runs on while threads go on, reads no registers of theirs."""
        import triton.language as tl

        from minfer_lib.kernels.triton.device import GPU
        from minfer_lib.kernels.triton.few_rows import _padded, few_rows_kernel, plan_few_rows

        plan = plan_few_rows(m, n, k, 2, end["GATED"], GPU(sms=132, shared_memory=227 * 1024, hopper=True))
        split = plan.splits > 1
        assert split == (n == HIDDEN)
        constants = dict(BLOCK_N=plan.block_n, BLOCK_M=_padded(m), BLOCK_K=plan.block_k, SPLIT=split, **end)
        constants |= dict(DOT_DTYPE={"bf16": tl.bfloat16, "fp16": tl.float16}[dtype])
        constants |= {} if split else dict(partial_ptr=None, tickets_ptr=None)
        pointers = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), "*" + dtype)
        pointers |= dict(partial_ptr="*fp32", tickets_ptr="*i32")
        done = compiled(
            few_rows_kernel, pointers, constants, unaligned=["m"], num_warps=plan.warps, num_stages=plan.stages
        )
        assert done.metadata.shared <= 227 * 1024
        products = [
            line for line in done.asm["ttgir"].splitlines() if re.search(r"= (ttng\.warp_group_dot|tt\.dot) ", line)
        ]
        assert len(products) == 1 + end["GATED"]
        assert all(("warp_group_dot" in line) == (plan.warps == 4) for line in products)
        assert all("memdesc" in line.split(":")[-1].split("*")[0] for line in products if "warp_group_dot" in line)
        loads = [line for line in done.asm["ptx"].splitlines() if "cp.async" in line and "global" in line]
        assert loads and all("0x10" in line or ", 16" in line for line in loads)

else:
    from minfer_lib.kernels import products, reference_parts
    from minfer_lib.kernels.triton import few_rows as few_rows_module
    from minfer_lib.kernels.triton import matvec as matvec_module
    from minfer_lib.kernels.triton.device import GPU
    from minfer_lib.kernels.triton.few_rows import RowsPlan, few_rows, plan_few_rows, tickets_of
    from minfer_lib.kernels.triton.matvec import MatvecPlan, matvec

    TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
    WHOLE, SPLIT = RowsPlan(16, 32, 4, 2), RowsPlan(16, 32, 4, 2, splits=3)
    ENDS = ["", "bias", "add", "gated", "bias gated", "bias gated add"]

    @pytest.fixture(autouse=True)
    def memory_that_nobody_wrote_is_nan():
        torch.use_deterministic_algorithms(True, warn_only=True)  # and with it torch fills what it hands out with NaN
        yield
        torch.use_deterministic_algorithms(False)

    def inside_nan(tensor):
        """A copy in the middle of a larger buffer of NaN, and the buffer; of codes, which have none, of -128."""
        filler = torch.nan if tensor.is_floating_point() else -128
        buffer = torch.full((tensor.numel() + 1024,), filler, dtype=tensor.dtype, device=tensor.device)
        part = buffer[512 : 512 + tensor.numel()].view(tensor.shape)
        return part.copy_(tensor), buffer

    class Case:
        """x [m, k], weight [n or 2n, k], and what `end` asks for, each in the middle of NaN."""

        def __init__(self, m, n, k, end="", dtype=torch.float32, int8=False, seed=0):
            g = torch.Generator().manual_seed(seed + 1000 * m + 100 * n + k)
            self.gated, rows = "gated" in end, 2 * n if "gated" in end else n
            weight, scale = torch.randn(rows, k, generator=g) * k**-0.5, None
            if int8:
                weight = torch.randint(-128, 128, (rows, k), generator=g, dtype=torch.int8)
                scale = 10 ** (torch.rand(rows, generator=g) * 2 - 3) * k**-0.5
            bias = torch.randn(rows, generator=g) if "bias" in end else None
            residual = torch.randn(m, n, generator=g) if "add" in end else None
            self.x, self.weight, self.scale, self.bias, self.residual = (
                None if part is None else inside_nan(part.to(DEVICE, kind or part.dtype))[0]
                for part, kind in (
                    (torch.randn(m, k, generator=g), dtype),
                    (weight, None if int8 else dtype),
                    (scale, None),
                    (bias, dtype),
                    (residual, dtype),
                )
            )

        def options(self):
            return dict(bias=self.bias, gated=self.gated) | ({} if self.scale is None else dict(scale=self.scale))

        def check(self, function, **more):
            """`function` gives what the reference gives in float64, twice the same bits, and writes nothing else."""
            parts = [self.x, self.weight, self.scale, self.bias, self.residual]
            wide = [part.double() if part is not None and part.is_floating_point() else part for part in parts]
            right = reference_parts.product(*wide[:4], gated=self.gated, add_to=wide[4])
            results = []
            for _ in range(2):
                out, buffer = (None, None) if self.residual is None else inside_nan(self.residual)
                y = function(self.x, self.weight, **self.options(), add_to=out, **more)
                assert y.dtype == self.x.dtype and y.shape == right.shape
                if out is not None:
                    assert y is out and int(buffer.isnan().sum()) == 1024
                results.append(y)
            assert torch.equal(*results)
            error = float((results[0].double() - right).norm() / right.norm())
            assert error < TOLERANCE[self.x.dtype], error
            return results[0]

    @pytest.mark.parametrize("k", [1, 16, 100, 512, 577])
    @pytest.mark.parametrize("n", [1, 5, 8, 33])
    def test_one_row_of_sizes_that_no_tile_divides(n, k):
        for end in ("bias", "gated"):
            Case(1, n, k, end).check(matvec)
            if k % 8 == 0:
                Case(1, n, k, end, int8=True).check(matvec)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("end", ENDS)
    @pytest.mark.parametrize("int8", [False, True])
    def test_one_row(int8, end, dtype):
        Case(1, 21, 1160, end, dtype, int8).check(matvec)

    @pytest.mark.parametrize("plan", [MatvecPlan(1, 2), MatvecPlan(2, 2), MatvecPlan(4, 4), MatvecPlan(8, 8)], ids=str)
    def test_one_row_by_every_plan(plan, monkeypatch):
        monkeypatch.setattr(matvec_module, "plan_matvec", lambda *shape: plan)
        for end in ("bias", "gated"):
            for int8 in (False, True):
                Case(1, 11, 2320, end, int8=int8).check(matvec)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_every_code_is_exact(dtype):
        weight = torch.arange(-128, 128, dtype=torch.int8, device=DEVICE)[:, None].repeat(1, 16)
        scale, x = torch.full((256,), 2.0**-7, device=DEVICE), torch.zeros(1, 16, device=DEVICE)
        x[0, 13] = -2.0
        assert torch.equal(matvec(x.to(dtype), weight, scale=scale).float(), weight[None, :, 13] / -64)

    def test_codes_and_x_with_a_mean():
        """The larger the sum of x, the more stands to be lost with what is taken off the sums."""
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            case = Case(1, 21, 1160, "", dtype, int8=True)
            case.x += 3
            case.check(matvec)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("end", ENDS)
    @pytest.mark.parametrize("m", [2, 20])
    def test_few_rows(m, end, dtype):
        Case(m, 41, 128, end, dtype).check(few_rows, plan=WHOLE)
        if "gated" not in end:
            Case(m, 41, 160, end, dtype).check(few_rows, plan=SPLIT)
            assert not bool(tickets_of(torch.empty(0, device=DEVICE).device).any())

    @pytest.mark.parametrize("m", [1, 2, 7, 16, 17, 33, 64])
    @pytest.mark.parametrize("n", [1, 15, 16, 50])
    def test_few_rows_of_sizes_that_no_tile_divides(m, n):
        Case(m, n, 64, "gated").check(few_rows, plan=WHOLE)
        Case(m, n, 96, "add").check(few_rows, plan=SPLIT)

    @pytest.mark.parametrize("m, n, k, end", [(3, 70, 1024, "add"), (3, 70, 128, "gated"), (40, 70, 128, "bias gated")])
    def test_few_rows_by_their_own_plan(m, n, k, end):
        Case(m, n, k, end).check(few_rows)

    def test_parts_that_do_not_come_out_even():
        """Five tiles along k in 2, 3, 4 and 5 parts: the last one shorter, or fewer parts than the plan asks for."""
        for splits in (2, 3, 4, 5, 9):
            Case(5, 20, 160).check(few_rows, plan=RowsPlan(16, 32, 4, 2, splits))

    def test_a_row_does_not_depend_on_its_company():
        case = Case(9, 40, 160)
        for plan in (WHOLE, SPLIT):
            together = case.check(few_rows, plan=plan)
            case.x[5] = torch.nan  # a row that nobody wants
            others = [i for i in range(9) if i != 5]
            assert torch.equal(few_rows(case.x, case.weight, plan=plan)[others], together[others])
            case.x[5] = 1.0

    def test_tensors_that_do_not_fit_are_refused():
        case = Case(1, 20, 128)
        for function, x in ((matvec, case.x), (few_rows, case.x.repeat(3, 1))):
            for wrong in (
                dict(bias=case.x[0, :19].contiguous()),
                dict(add_to=x.new_zeros(len(x), 19)),
                dict(gated=True),
            ):
                with pytest.raises(AssertionError):
                    function(x, case.weight, **wrong, **({} if "bias" in wrong else dict(bias=x.new_zeros(10))))
            with pytest.raises(AssertionError):
                function(x[:, :127].contiguous(), case.weight)

    # -- which kernel computes a product ------------------------------------------------------------------------------

    BF16, FP32 = torch.bfloat16, torch.float32

    @pytest.mark.parametrize(
        "m, n, k, dtype, int8, gated, way",
        [
            (1, QKV, HIDDEN, BF16, False, False, "matvec"),
            (1, 2 * INTERMEDIATE, HIDDEN, FP32, False, True, "matvec"),
            (1, QKV, 1000, BF16, False, False, "torch"),
            (1, QKV, 1000, BF16, True, False, "matvec"),
            (1, QKV, 1001, BF16, True, False, "int8_linear"),
            (2, QKV, HIDDEN, BF16, True, True, "int8_linear"),
            (0, QKV, HIDDEN, BF16, True, False, "int8_linear"),
            (0, QKV, HIDDEN, BF16, False, True, "torch"),
            (2, HIDDEN, HIDDEN, BF16, False, False, "few_rows"),
            (16, HIDDEN, INTERMEDIATE, torch.float16, False, False, "few_rows"),
            (16, QKV, HIDDEN, BF16, False, False, "torch"),
            (16, VOCABULARY, HIDDEN, BF16, False, False, "few_rows"),
            (17, VOCABULARY, HIDDEN, BF16, False, False, "torch"),
            (17, 2 * INTERMEDIATE, HIDDEN, BF16, False, True, "few_rows"),
            (64, 2 * INTERMEDIATE, HIDDEN, BF16, False, True, "few_rows"),
            (65, 2 * INTERMEDIATE, HIDDEN, BF16, False, True, "torch"),
            (8, 2 * INTERMEDIATE, HIDDEN, FP32, False, True, "torch"),
            (8, HIDDEN, 3600, BF16, False, False, "torch"),
            (1, QKV, HIDDEN, torch.float64, False, False, "torch"),
        ],
    )
    def test_the_kernel_follows_from_shape_and_dtype(m, n, k, dtype, int8, gated, way):
        assert products.choose(m, n, k, dtype, int8, gated) == way

    @pytest.mark.parametrize("memory", [64 * 1024, 99 * 1024, 227 * 1024])
    def test_plans_fit_the_gpu(memory):
        for sms in (1, 20, 132):
            gpu = GPU(sms=sms, shared_memory=memory, hopper=memory > 200_000)
            for m in (2, 16, 17, 64):
                for n, k in ((1, 128), (512, 3584), (HIDDEN, INTERMEDIATE), (2 * INTERMEDIATE, HIDDEN)):
                    for gated in (False, True):
                        plan = plan_few_rows(m, n, k, 2, gated, gpu)
                        tiles = ((1 + gated) * plan.block_n + max(16, m)) * plan.block_k * 2
                        assert plan.stages >= 1 and plan.stages * tiles < memory
                        assert plan.splits == 1 or (not gated and plan.splits <= k // 512)

    @pytest.mark.parametrize("end", ENDS)
    @pytest.mark.parametrize(
        "m, k, int8, way",
        [
            (1, 144, False, "matvec"), (1, 145, False, "torch"), (1, 144, True, "matvec"),
            (1, 145, True, "int8_linear"), (3, 128, False, "few_rows"), (3, 145, False, "torch"),
            (3, 144, True, "int8_linear"),
        ],
    )  # fmt: skip
    def test_every_way_ends_alike(m, k, int8, way, end):
        """The bias, the gate and the residual, whoever computes the product."""
        dtype = torch.bfloat16 if way == "few_rows" else torch.float32
        assert products.choose(m, 40, k, dtype, int8, "gated" in end) == way

        def run(x, weight, scale=None, bias=None, gated=False, add_to=None):
            return products._on_gpu(x, weight, scale, bias, gated, add_to)

        Case(m, 20, k, end, dtype, int8).check(run)

    @pytest.mark.parametrize("int8", [False, True])
    def test_on_a_cpu_it_is_torch(int8, monkeypatch):
        monkeypatch.setattr(products, "_on_gpu", None)
        case = Case(3, 20, 50, "bias gated add", torch.bfloat16, int8)
        parts = [None if part is None else part.cpu() for part in (case.x, case.weight, case.scale, case.bias)]
        weight = case.weight if case.scale is None else (case.weight * case.scale[:, None])
        y = (case.x.double() @ weight.double().T + case.bias).cpu()
        right = case.residual.cpu() + torch.nn.functional.silu(y[:, :20]) * y[:, 20:]
        residual = case.residual.cpu()
        got = products.product(*parts, gated=True, add_to=residual)
        assert got is residual and float((got - right).norm() / right.norm()) < 2e-2

    # -- on a GPU alone -----------------------------------------------------------------------------------------------

    @pytest.mark.skipif(DEVICE == "cpu", reason="what goes wrong at times only goes wrong on the GPU")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("int8", [False, True])
    def test_the_same_right_bits_again_and_again(int8, dtype):
        for n, k, end in ((QKV, HIDDEN, "bias"), (HIDDEN, INTERMEDIATE, "add"), (INTERMEDIATE, HIDDEN, "gated")):
            for m in (1, 2, 9, 16, 17, 33, 64):
                case = Case(m, n, k, end, dtype, int8)
                first = None
                for _ in range(30):
                    residual = None if case.residual is None else case.residual.clone()
                    y = products.product(case.x, case.weight, case.scale, case.bias, gated=case.gated, add_to=residual)
                    first = y if first is None else first
                    assert torch.equal(first, y), (m, n, k)

    @pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need the GPU")
    def test_graph_replay():
        for m in (1, 5, 40):
            case = Case(m, 3584, 3584, "", torch.bfloat16)
            products.product(case.x, case.weight)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = products.product(case.x, case.weight)
            case.x.copy_(torch.randn_like(case.x))
            for _ in range(3):
                graph.replay()
                assert torch.equal(captured, products.product(case.x, case.weight))

    def test_tickets_are_made_before_a_capture(monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(AssertionError, match="once before capture"):
            few_rows_module.tickets_of.__wrapped__(torch.device("cuda", 0))
