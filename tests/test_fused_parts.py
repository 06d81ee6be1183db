"""The small kernels of a fused layer, against torch in float64 and against transformers: on the GPU, else interpreted.

Triton decides at its import whether it interprets, for the whole process, so on a CPU the tests run in a process of
their own: one test starts pytest on this file again with TRITON_INTERPRET=1. The others compile for an H100.
"""

import pytest
import torch
from interpreted import DEVICE, HERE, run_interpreted

pytest.importorskip("triton")

if not HERE:

    def test_interpreted_in_a_process_of_its_own():
        run_interpreted(__file__)

    def compiled(kernel, pointers, constants, unaligned=(), warps=4, **kinds):
        """The kernel for an H100, in bfloat16; `unaligned` are integers that may be anything."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile

        names = kernel.arg_names
        constants = {name: constants[name] for name in names if name in constants}
        others = {"eps": "fp32", "slots_ptr": "*i64"} | dict.fromkeys(pointers, "*bf16") | kinds
        types = {name: others.get(name, "i32") for name in names if name not in constants}
        aligned = [name for name in types if name not in unaligned and name != "eps"]
        source = ASTSource(
            fn=kernel,
            signature=types | dict.fromkeys(constants, "constexpr"),
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        )
        return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})

    NO_SCALES = dict(key_scales_ptr=None, value_scales_ptr=None)
    IN_INT8 = dict(keys_ptr="*i8", values_ptr="*i8", key_scales_ptr="*fp32", value_scales_ptr="*fp32")

    def test_norms_and_gates_compile_for_an_h100():
        """And read 16 bytes at a time."""
        from minfer_lib.kernels.triton.fused_parts import rms_norm_kernel, silu_mul_kernel

        norm = compiled(rms_norm_kernel, ["x_ptr", "gain_ptr", "out_ptr"], dict(BLOCK=4096), warps=8)
        gate = compiled(silu_mul_kernel, ["x_ptr", "out_ptr"], dict(BLOCK=1024))
        for done in (norm, gate):
            loads = [line for line in done.asm["ptx"].splitlines() if "ld.global" in line]
            assert len(loads) >= 2 and all("v4.b32" in line for line in loads)

    @pytest.mark.parametrize("heads, kv_heads, norm", [(28, 4, False), (16, 8, True)])
    @pytest.mark.parametrize("block, warps", [(4, 1), (32, 4)])
    def test_rotation_and_cache_write_compile_for_an_h100(heads, kv_heads, norm, block, warps):
        from minfer_lib.kernels.triton.fused_parts import rope_cache_kernel

        constants = dict(HEADS=heads, KV_HEADS=kv_heads, DIM=128, PADDED_HALF=64, BLOCK_H=block, NORM=norm)
        constants |= {} if norm else dict(q_gain_ptr=None, k_gain_ptr=None)
        pointers = [name for name in rope_cache_kernel.arg_names if name.endswith("_ptr") and name != "slots_ptr"]
        done = compiled(rope_cache_kernel, pointers, constants | NO_SCALES, warps=warps)
        compiled(rope_cache_kernel, pointers, constants, warps=warps, **IN_INT8)
        stores = [line for line in done.asm["ptx"].splitlines() if "st.global" in line]
        assert stores and all("v4.b32" in line or "v2.b32" in line for line in stores)

    def test_the_cache_write_compiles_for_an_h100():
        from minfer_lib.kernels.triton.fused_parts import write_cache_kernel

        strides = ["k_token", "k_head", "v_token", "v_head"]
        constants = dict(KV_HEADS=4, KEY_DIM=128, VALUE_DIM=128, PADDED_HEADS=4, PADDED_KEY=128, PADDED_VALUE=128)
        pointers = ["k_ptr", "v_ptr", "keys_ptr", "values_ptr"]
        done = compiled(write_cache_kernel, pointers, constants | NO_SCALES, unaligned=strides)
        assert all("v2.b32" in line for line in done.asm["ptx"].splitlines() if "st.global" in line)
        compiled(write_cache_kernel, pointers, constants, unaligned=strides, **IN_INT8)

else:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    from minfer_lib.errors import UnsupportedModel
    from minfer_lib.kernels import reference_parts
    from minfer_lib.kernels.triton import fused_parts

    FLOATS = [torch.float32, torch.float16, torch.bfloat16]
    TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
    BOTH = pytest.mark.parametrize("parts", [fused_parts, reference_parts], ids=["triton", "torch"])

    @pytest.fixture(autouse=True)
    def memory_that_nobody_wrote_is_nan():
        torch.use_deterministic_algorithms(True, warn_only=True)  # and with it torch fills what it hands out with NaN
        yield
        torch.use_deterministic_algorithms(False)

    def random(*shape, dtype=torch.float32, seed=0):
        """Random numbers in the middle of a larger buffer of NaN."""
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)
        return inside_nan(values)[0].to(DEVICE) if DEVICE == "cpu" else inside_nan(values.to(DEVICE))[0]

    def inside_nan(tensor):
        buffer = torch.full((tensor.numel() + 256,), torch.nan, dtype=tensor.dtype, device=tensor.device)
        part = buffer[128 : 128 + tensor.numel()].view(tensor.shape)
        return part.copy_(tensor), buffer

    def assert_close(got, right):
        assert got.shape == right.shape
        error = float((got.double() - right.double()).norm() / right.double().norm())
        assert error < TOLERANCE[got.dtype], error

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("rows, n", [(1, 1), (3, 7), (2, 64), (5, 100), (1, 3584), (70, 129)])
    def test_rms_norm(rows, n, dtype):
        x, gain = random(rows, n, dtype=dtype), random(n, dtype=dtype, seed=1)
        got = fused_parts.rms_norm(x, gain, 1e-5)
        assert got.dtype == dtype
        assert_close(got, reference_parts.rms_norm(x.double(), gain.double(), 1e-5))
        assert torch.equal(got, fused_parts.rms_norm(x, gain, 1e-5))

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_the_norm_in_torch_is_that_of_transformers(dtype):
        norm = Qwen3RMSNorm(64, 1e-6).to(DEVICE, dtype)
        norm.weight.data = random(64, dtype=dtype, seed=1)
        x = random(5, 64, dtype=dtype)
        assert torch.equal(reference_parts.rms_norm(x, norm.weight, 1e-6), norm(x))

    def test_a_normalised_value_is_rounded_before_the_gain():
        """In the dtype's own steps: a gain of 1 + 2**-7 shows it, with 16 bits, at nearly every second number."""
        x = random(8, 256, dtype=torch.float16)
        gain = torch.full((256,), 1 + 2.0**-7, dtype=torch.float16, device=DEVICE)
        got = fused_parts.rms_norm(x, gain, 1e-6)
        normed = x.double() * (x.double().square().mean(1, keepdim=True) + 1e-6).rsqrt()
        rounded, unrounded = (normed.half().double() * gain).half(), (normed * gain).half()
        assert float((got == rounded).float().mean()) > 0.99 > 0.9 > float((got == unrounded).float().mean())

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("rows, n", [(1, 1), (3, 100), (2, 1024), (2, 1025), (1, 3000)])
    def test_silu_mul(rows, n, dtype):
        x = random(rows, 2 * n, dtype=dtype)
        got = fused_parts.silu_mul(x)
        assert got.dtype == dtype
        assert_close(got, reference_parts.silu_mul(x.double()))

    def test_the_gate_is_rounded_before_it_meets_up():
        x = random(8, 600, dtype=torch.float16)
        gate, up = x.double().chunk(2, 1)
        silu = torch.nn.functional.silu(gate)
        got, rounded, unrounded = fused_parts.silu_mul(x), (silu.half().double() * up).half(), (silu * up).half()
        assert float((got == rounded).float().mean()) > 0.99 > 0.9 > float((got == unrounded).float().mean())

    def test_silu_of_large_numbers():
        x = torch.tensor([[-1e30, -200.0, -0.0, 200.0, 1e30, 1, 1, 1, 1, 1]], device=DEVICE)
        torch.testing.assert_close(fused_parts.silu_mul(x), reference_parts.silu_mul(x))

    class Step:
        """T new tokens, their angles, and a cache where each of them has a row of its own, in no order."""

        def __init__(self, tokens, heads, kv_heads, dim, norm, dtype=torch.float32, pool_dtype=None):
            self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
            self.qkv = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
            angles = random(tokens, dim // 2).repeat(1, 2)
            self.cos, self.sin = (inside_nan(part.to(dtype))[0] for part in (angles.cos(), angles.sin()))
            self.gains = [random(dim, dtype=dtype, seed=i) if norm else None for i in (1, 2)]
            self.pools = [random(3 * tokens + 2, kv_heads, dim, dtype=pool_dtype or dtype, seed=i) for i in (3, 4)]
            self.slots = torch.randperm(3 * tokens + 2, generator=torch.Generator().manual_seed(0))[:tokens].to(DEVICE)

        def run(self, parts, wide=False):
            """q, keys, values, the pools as they were before having NaN around them; in float64 if `wide`."""
            given = [self.qkv, self.cos, self.sin, *self.gains]
            given = [part.double() if wide and part is not None else part for part in given]
            pools, buffers = zip(*(inside_nan(pool.double() if wide else pool) for pool in self.pools), strict=True)
            q = parts.rope_cache(*given, self.slots, *pools, 1e-6, self.heads, self.kv_heads)
            assert q.dtype == given[0].dtype and q.is_contiguous()
            assert all(int(buffer.isnan().sum()) == 256 for buffer in buffers)
            return q, *pools

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("norm", [False, True])
    @pytest.mark.parametrize(
        "tokens, heads, kv_heads, dim",
        [(1, 1, 1, 2), (3, 4, 2, 16), (2, 28, 4, 128), (5, 3, 1, 80), (1, 16, 8, 24), (64, 2, 1, 8), (65, 9, 3, 6)],
    )
    def test_rope_cache(tokens, heads, kv_heads, dim, norm, dtype):
        step = Step(tokens, heads, kv_heads, dim, norm, dtype)
        got = step.run(fused_parts)
        for one, right in zip(got, step.run(reference_parts, wide=True), strict=True):
            assert_close(one, right)
        others = [i for i in range(3 * tokens + 2) if i not in step.slots.tolist()]
        values = step.qkv.view(tokens, -1, dim)[:, heads + kv_heads :]
        assert torch.equal(got[2][step.slots], values)
        for pool, before in zip(got[1:], step.pools, strict=True):
            assert torch.equal(pool[others], before[others])
        assert all(torch.equal(one, again) for one, again in zip(got, step.run(fused_parts), strict=True))

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_rope_cache_in_torch_is_that_of_transformers(dtype):
        step = Step(5, 4, 2, 16, True, dtype)
        q, k, _ = (part.transpose(0, 1)[None] for part in step.qkv.view(5, -1, 16).split([4, 2, 2], 1))
        norms = [Qwen3RMSNorm(16, 1e-6).to(DEVICE, dtype) for _ in range(2)]
        for norm, gain in zip(norms, step.gains, strict=True):
            norm.weight.data = gain
        q, k = apply_rotary_pos_emb(norms[0](q), norms[1](k), step.cos[None], step.sin[None])
        got_q, keys, _ = step.run(reference_parts)
        assert torch.equal(got_q, q[0].transpose(0, 1)) and torch.equal(keys[step.slots], k[0].transpose(0, 1))

    def test_slots_of_32_bits_and_a_cache_of_another_dtype():
        step = Step(5, 4, 2, 16, True, torch.float32, torch.float16)
        right = step.run(reference_parts)
        step.slots = step.slots.int()
        for one, other in zip(step.run(fused_parts), right, strict=True):
            assert one.dtype == other.dtype
            assert_close(one, other)

    @BOTH
    def test_what_is_not_turned_as_a_whole_is_refused(parts):
        step = Step(3, 4, 2, 16, False)
        cos, sin = step.cos[:, :8].contiguous(), step.sin[:, :8].contiguous()
        with pytest.raises(UnsupportedModel, match="turns 8 of 16 numbers"):
            parts.rope_cache(step.qkv, cos, sin, None, None, step.slots, *step.pools, 0.0, 4, 2)
        with pytest.raises(AssertionError):
            parts.rope_cache(step.qkv, step.cos, step.sin, None, None, step.slots, *step.pools, 0.0, 5, 2)
        with pytest.raises(AssertionError):
            parts.rope_cache(step.qkv, step.cos, step.sin, None, None, step.slots[:2], *step.pools, 0.0, 4, 2)

    @BOTH
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("key_dim, value_dim", [(1, 1), (16, 16), (24, 5), (3, 40)])
    def test_write_cache(key_dim, value_dim, dtype, parts):
        """Tokens first or heads first, and the numbers of a head not even side by side."""
        rows = torch.randperm(11, generator=torch.Generator().manual_seed(0))[:5].to(DEVICE)
        for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0)):
            k, v = (random(5, 3, dim, dtype=dtype, seed=dim) for dim in (key_dim, value_dim))
            pools, buffers = zip(
                *(inside_nan(random(11, 3, dim, dtype=dtype)) for dim in (key_dim, value_dim)), strict=True
            )
            right = [pool.clone() for pool in pools]
            right[0][rows], right[1][rows] = k, v
            back = [order.index(i) for i in range(3)]
            parts.write_cache(*(part.permute(order).contiguous().permute(back) for part in (k, v)), rows, *pools)
            assert all(torch.equal(pool, one) for pool, one in zip(pools, right, strict=True))
            assert all(int(buffer.isnan().sum()) == 256 for buffer in buffers)

    def special_rows(dim, dtype):
        """[8, dim] with what rounding has to think of: ties, zeros, numbers below all scales, NaN and infinity."""
        x = random(8, dim, dtype=dtype).clone()
        x[1] = 0
        x[2], x[2, 0] = 0.5, 127.0
        x[3], x[3, -1] = -1.5, -127.0
        x[4] = 1e-37 if dtype != torch.float16 else 0
        x[5, dim // 2], x[6, 0], x[7, -1] = torch.nan, torch.inf, -torch.inf
        return x

    @BOTH
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("key_dim, value_dim", [(16, 16), (24, 5)])
    def test_write_cache_in_int8(key_dim, value_dim, dtype, parts):
        """The codes and scales of `quantize_rows`, bit by bit, and nothing in any other row."""
        rows = torch.tensor([7, 0, 3, 9], device=DEVICE)
        k, v = (special_rows(dim, dtype).view(4, 2, dim) for dim in (key_dim, value_dim))
        pools = [torch.full((11, 2, dim), 77, dtype=torch.int8, device=DEVICE) for dim in (key_dim, value_dim)]
        scales = [torch.full((11, 2), 77.0, device=DEVICE) for _ in range(2)]
        parts.write_cache(k, v, rows, *pools, *scales)
        others = [i for i in range(11) if i not in rows.tolist()]
        for x, codes, scale in zip((k, v), pools, scales, strict=True):
            right = reference_parts.quantize_rows(x)
            assert torch.equal(codes[rows], right[0]) and torch.equal(
                scale[rows].nan_to_num(-1), right[1].nan_to_num(-1)
            )
            assert bool((codes[others] == 77).all() and (scale[others] == 77).all())
            assert scale[rows].isfinite().flatten().tolist() == [True] * 5 + [False] * 3

    @BOTH
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("tokens, heads, kv_heads, dim", [(3, 4, 2, 16), (65, 9, 3, 6), (5, 3, 1, 80)])
    @pytest.mark.parametrize("norm", [False, True])
    def test_rope_cache_in_int8(tokens, heads, kv_heads, dim, norm, dtype, parts):
        """What it writes is what it would have written, quantised; and a key that is no number stays none."""
        step = Step(tokens, heads, kv_heads, dim, norm, dtype)
        step.qkv.view(tokens, -1, dim)[1, heads, 3] = torch.inf
        rows, given = len(step.pools[0]), [step.qkv, step.cos, step.sin, *step.gains, step.slots]
        right = [pool.clone() for pool in step.pools]
        right_q = parts.rope_cache(*given, *right, 1e-6, heads, kv_heads)
        pools = [torch.full((rows, kv_heads, dim), 77, dtype=torch.int8, device=DEVICE) for _ in range(2)]
        scales = [torch.full((rows, kv_heads), 77.0, device=DEVICE) for _ in range(2)]
        q = parts.rope_cache(*given, *pools, 1e-6, heads, kv_heads, *scales)
        assert torch.equal(q, right_q)
        others = [i for i in range(rows) if i not in step.slots.tolist()]
        for codes, scale, full in zip(pools, scales, right, strict=True):
            wanted = reference_parts.quantize_rows(full[step.slots])
            assert torch.equal(codes[step.slots], wanted[0])
            assert torch.equal(scale[step.slots].nan_to_num(-1), wanted[1].nan_to_num(-1))
            assert bool((codes[others] == 77).all() and (scale[others] == 77).all())
        assert int((~scales[0].isfinite()).sum()) == 1 and bool(scales[1].isfinite().all())

    @BOTH
    def test_no_tokens(parts):
        step = Step(0, 4, 2, 16, True)
        assert step.run(parts)[0].shape == (0, 4, 16)
        assert parts.rms_norm(random(0, 8), random(8), 1e-6).shape == (0, 8)
        assert parts.silu_mul(random(0, 8)).shape == (0, 4)
        k = random(0, 2, 16)
        parts.write_cache(k, k, step.slots, *step.pools)

    @pytest.mark.skipif(DEVICE == "cpu", reason="nothing is compiled for the interpreter")
    def test_other_numbers_of_tokens_compile_nothing_anew(monkeypatch):
        import triton

        made = []
        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **call: made.append(call) and None)
        for tokens in (1, 2, 16, 33, 63):
            Step(tokens, 4, 2, 64, True, torch.bfloat16).run(fused_parts)
            fused_parts.rms_norm(random(tokens, 64), random(64), 1e-6)
            fused_parts.silu_mul(random(tokens, 64))
            k, pool = random(2, tokens, 64).transpose(0, 1), random(tokens, 2, 64)
            fused_parts.write_cache(k, k, torch.arange(tokens, device=DEVICE), pool, pool.clone())
            assert len(made) <= 4

    @pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs and pools of more than 2**31 numbers need the GPU")
    def test_graph_replay_and_64_bit_offsets():
        step = Step(3, 28, 4, 128, False, torch.bfloat16)
        step.run(fused_parts)
        pools = [torch.zeros(2**31 // 512 + 9, 4, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
        slots = torch.arange(3, device=DEVICE)
        given = (step.qkv, step.cos, step.sin, None, None, slots, *pools, 0.0, 28, 4)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q = fused_parts.rope_cache(*given)
        slots += 2**31 // 512 + 3
        step.qkv.copy_(torch.randn_like(step.qkv))
        graph.replay()
        right, keys, values = step.run(fused_parts)
        assert torch.equal(q, right)
        assert torch.equal(pools[0][slots], keys[step.slots]) and torch.equal(pools[1][slots], values[step.slots])
        assert not bool(pools[0][: 2**31 // 512 + 3].any())
