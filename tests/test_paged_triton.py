"""The Triton kernels of paged attention, against a float64 reference: on the GPU, else interpreted on the CPU.

Triton decides at its import whether it interprets, for the whole process, so on a CPU the tests run in a process of
their own: the one test that pytest finds there starts pytest on this file again with TRITON_INTERPRET=1.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from interpreted import DEVICE, HERE, run_interpreted

pytest.importorskip("triton")

if not HERE:

    def test_interpreted_in_a_process_of_its_own():
        run_interpreted(__file__)

    def compiled(kernel, plan, dim, kinds=(), **constants):
        """A kernel for an H100, in bfloat16 with 28 heads on 4; kinds: {pointer: another}, None for none."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile
        from triton.language import bfloat16

        aligned = ("query_ptr", "keys_ptr", "values_ptr", "out_ptr")
        pointers = dict.fromkeys(aligned, "*bf16") | dict.fromkeys(("tables_ptr", "lens_ptr", "starts_ptr"), "*i32")
        pointers |= {"partial_ptr": "*fp32", "tickets_ptr": "*i32"} | dict(kinds)
        constants |= dict(KV_HEADS=4, GROUP=7, BLOCK_SIZE=16, KEY_DIM=dim, VALUE_DIM=dim, PADDED_KEY=dim)
        constants |= dict(PADDED_VALUE=dim, ROWS=plan.rows, TILE=plan.tile, CAPPED=False, SINKS=False)
        constants |= dict(DOT_DTYPE=bfloat16, sinks_ptr=None) | NO_SCALES
        constants = {name: value for name, value in constants.items() if name not in dict(kinds)}
        names = kernel.arg_names
        types = {name: pointers.get(name, "fp32" if name in ("scale", "cap") else "i32") for name in names}
        source = ASTSource(
            fn=kernel,
            signature=types | dict.fromkeys(constants, "constexpr"),
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(n),): [["tt.divisibility", 16]] for n in (*aligned, "token_stride", "head_stride")},
        )
        options = {"num_warps": plan.warps, "num_stages": plan.stages}
        done = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert done.metadata.shared <= 227 * 1024
        return done

    NO_SCALES = dict(key_scales_ptr=None, value_scales_ptr=None)
    IN_INT8 = dict(keys_ptr="*i8", values_ptr="*i8", key_scales_ptr="*fp32", value_scales_ptr="*fp32")

    @pytest.mark.parametrize("dim", [64, 128, 256])
    @pytest.mark.parametrize("parts", ["one", "few", "many"])
    def test_decoding_over_int8_compiles_for_an_h100(dim, parts):
        """And its codes are loaded 16 at a time."""
        from minfer_lib.kernels.triton.paged_kernels import decode_kernel
        from minfer_lib.kernels.triton.paged_plan import plan_decode

        plan = plan_decode(7, dim, dim, 2, 227 * 1024)
        done = compiled(decode_kernel, plan, dim, IN_INT8, PARTS=parts, AT_ONCE=4)
        assert "cp.async.cg.shared.global" in done.asm["ptx"] and ", 0x10," in done.asm["ptx"]

    @pytest.mark.parametrize("kinds", [{}, IN_INT8], ids=["bfloat16", "int8"])
    @pytest.mark.parametrize("dim", [64, 128, 256])
    def test_a_step_waits_for_the_tensor_cores_of_hopper(dim, kinds):
        """Compiled for an H100 without one: each product is waited for before anything else is done.

        Hopper's matrix instruction runs on while the threads go on, and may still read its left operand, the softmax
        weights, from registers. A wrong product is a matter of luck on the GPU; the waits can be read in the program.
        """
        from minfer_lib.kernels.triton.paged_kernels import prefill_kernel
        from minfer_lib.kernels.triton.paged_plan import plan_prefill

        done = compiled(prefill_kernel, plan_prefill(dim, dim, 2, 227 * 1024), dim, kinds, ASYNCHRONOUS=True)
        assert "wgmma.mma_async" in done.asm["ptx"]
        lines = [line for line in done.asm["ttgir"].splitlines() if "ttng.warp_group_dot" in line]
        products, waits = lines[::2], lines[1::2]
        assert len(products) == len(waits) == 4  # scores and averages, in the loop with a mask and in that without
        assert all("warp_group_dot " in line for line in products)
        assert all("warp_group_dot_wait" in line and "pendings = 0" in line for line in waits)

else:
    from minfer_lib.errors import InvalidParameter
    from minfer_lib.kernels.reference_parts import quantize_rows
    from minfer_lib.kernels.triton import device
    from minfer_lib.kernels.triton import paged_attention as kernels
    from minfer_lib.kernels.triton.device import GPU, gpu_of
    from minfer_lib.kernels.triton.paged_attention import paged_decode, paged_prefill
    from minfer_lib.kernels.triton.paged_plan import plan_decode, plan_prefill, plan_splits

    # What rounding to a dtype may change, relatively; Triton's interpreter cuts float32 off to bfloat16 instead.
    EPS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8 if DEVICE == "cuda" else 2.0**-7}

    class Case:
        """Requests of given lengths with new tokens each, in a pool where every row that was not written is NaN.

        The blocks are handed out in random order; `shared` first blocks belong to all requests. The block tables are a
        slice of a wider table, and a row of them goes on behind its request's blocks with others of the pool.
        """

        def __init__(
            self, lens, new=None, *, heads=4, kv_heads=2, dim=32, value_dim=None, block_size=16, dtype=torch.float32,
            shared=0, spare=3, seed=0, size=1.0,
        ):  # fmt: skip
            g = torch.Generator().manual_seed(seed)
            self.lens, self.new, self.block_size = list(lens), list(new or [1] * len(lens)), block_size
            value_dim = value_dim or dim
            widths = [max(1, -(-n // block_size)) for n in lens]
            blocks = torch.randperm(2 * sum(widths) + spare, generator=g).tolist()
            keys = torch.full((len(blocks) * block_size, kv_heads, dim), torch.nan)
            wide = torch.randint(len(blocks), (len(lens), max(widths) + 6), generator=g)
            values = torch.full((len(keys), kv_heads, value_dim), torch.nan)
            common = [blocks.pop() for _ in range(shared)]
            tables = [common + [blocks.pop() for _ in range(width - shared)] for width in widths]
            self.rows = [
                [t[p // block_size] * block_size + p % block_size for p in range(n)]
                for t, n in zip(tables, lens, strict=True)
            ]
            for rows in self.rows:
                keys[rows] = torch.randn(len(rows), kv_heads, dim, generator=g) * size
                values[rows] = torch.randn(len(rows), kv_heads, value_dim, generator=g)
            query = torch.randn(sum(self.new), heads, dim, generator=g)
            self.query, self.keys, self.values = (part.to(dtype).to(DEVICE) for part in (query, keys, values))
            for row, table in zip(wide, tables, strict=True):
                row[: len(table)] = torch.tensor(table)
            self.tables = wide.int().to(DEVICE)[:, : max(widths) + 1]
            self.kv_lens = torch.tensor(self.lens, dtype=torch.int32, device=DEVICE)
            self.starts = torch.tensor([0, *self.new], device=DEVICE).cumsum(0).int()
            self.scale = dim**-0.5
            self.codes, self.scales = (), {}

        def in_int8(self):
            """The same with pools of int8; `keys` and `values` become what the codes stand for, in float64."""
            keys, values = quantize_rows(self.keys), quantize_rows(self.values)
            self.codes, self.scales = (keys[0], values[0]), dict(key_scales=keys[1], value_scales=values[1])
            self.keys, self.values = (codes.double() * scale[..., None] for codes, scale in (keys, values))
            return self

        def reference(self, window=None, softcap=None, sinks=None):
            """(result in float64, highest score): what the formula says, one token at a time."""
            outs, token, highest = [], 0, 0.0
            for rows, n in zip(self.rows, self.new, strict=True):
                k, v = self.keys[rows].double(), self.values[rows].double()
                group = self.query.shape[1] // k.shape[1]
                for position in range(len(rows) - n, len(rows)):
                    first = 0 if window is None else max(0, position - window + 1)
                    q = self.query[token].double().unflatten(0, (k.shape[1], group))  # [kv_heads, group, dim]
                    s = torch.einsum("hgd,nhd->hgn", q, k[first : position + 1]).flatten(0, 1) * self.scale
                    highest = max(highest, float(s.abs().max()))
                    if softcap is not None:
                        s = softcap * torch.tanh(s / softcap)
                    if sinks is not None:
                        s = torch.cat([s, sinks.double()[:, None]], 1)
                    w = s.softmax(1)[:, : position + 1 - first].unflatten(0, (k.shape[1], group))
                    outs.append(torch.einsum("hgn,nhd->hgd", w, v[first : position + 1]).flatten(0, 1))
                    token += 1
            return torch.stack(outs), highest

        def decode(self, splits=None, **special):
            """splits: parts to cut the longest request into, instead of what `plan_splits` says."""

            def plan(requests, kv_heads, longest, sms):
                keys = -(-longest // splits)
                return -(-longest // keys), keys

            with mock.patch.object(kernels, "plan_splits", plan if splits else plan_splits):
                return paged_decode(
                    self.query, *(self.codes or (self.keys, self.values)), self.tables, self.kv_lens,
                    block_size=self.block_size, longest=max(self.lens), scale=self.scale, **special, **self.scales,
                )  # fmt: skip

        def prefill(self, **special):
            return paged_prefill(
                self.query, *(self.codes or (self.keys, self.values)), self.tables, self.kv_lens, self.starts,
                block_size=self.block_size, most_new=max(self.new), scale=self.scale, **special, **self.scales,
            )  # fmt: skip

    def assert_right(out, case, **special):
        """An average of values: off by what rounding the weights and the result to the dtype may change of the largest,
        and values that are made of codes.

        Beside that the scores are float32 sums, and an error of theirs is a relative one of the weights.
        """
        right, score = case.reference(**special)
        assert out.dtype == case.query.dtype and out.shape == right.shape and out.device == right.device
        largest = float(case.values.nan_to_num(0.0).abs().max())
        error = float((out.double() - right).abs().max())
        allowed = largest * ((3 if case.scales else 2) * EPS[out.dtype] + 2.0**-22 * (1 + score))
        assert error <= allowed, (error, allowed)

    def sinks_of(heads):
        return torch.linspace(-2, 3, heads, device=DEVICE)

    SPECIAL = {
        "plain": {},
        "window": {"window": 9},
        "softcap": {"softcap": 1.5},
        "sinks": {"sinks": True},
        "all": {"window": 20, "softcap": 2.0, "sinks": True},
    }

    def special_of(name, heads):
        special = dict(SPECIAL[name])
        return special | {"sinks": sinks_of(heads)} if "sinks" in special else special

    @pytest.fixture(autouse=True)
    def small_tiles(monkeypatch):
        """Where Python runs the kernels, tiles of a few keys: short contexts take several of them, too."""
        if DEVICE == "cpu":
            monkeypatch.setattr(kernels, "gpu_of", lambda device: GPU(1, 20 * 1024, hopper=False))

    @pytest.mark.parametrize("splits", [1, 3])
    @pytest.mark.parametrize("block_size", [1, 2, 7, 16, 64, 100])
    def test_decode_follows_any_table(block_size, splits):
        case = Case([1, 64, 131], block_size=block_size)
        assert_right(case.decode(splits), case)

    # Where Python runs the kernels, the half precisions once with everything is enough.
    ASKED = [
        (special, dtype)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for special in SPECIAL
        if DEVICE == "cuda" or dtype == torch.float32 or special == "all"
    ]

    @pytest.mark.parametrize("splits", [1, 4])
    @pytest.mark.parametrize("special, dtype", ASKED)
    def test_decode_with_what_layers_ask_for(special, dtype, splits):
        case = Case([70, 3], heads=6, dim=24, value_dim=40, dtype=dtype)
        special = special_of(special, 6)
        assert_right(case.decode(splits, **special), case, **special)

    @pytest.mark.parametrize("heads, kv_heads", [(1, 1), (3, 3), (14, 2), (28, 4), (8, 1), (40, 1)])
    @pytest.mark.parametrize("dim, value_dim", [(16, 16), (80, 80), (96, 64), (112, 112), (256, 256)])
    def test_heads_and_head_sizes(heads, kv_heads, dim, value_dim):
        if DEVICE == "cpu" and dim != 80 and heads != 3:
            pytest.skip("slow where Python runs the kernel, and little new in it")
        case = Case([33, 2], heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim)
        assert_right(case.decode(), case)
        case = Case([33, 4], [3, 4], heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim)
        assert_right(case.prefill(), case)

    @pytest.mark.parametrize("block_size", [1, 2, 7, 16, 64, 100])
    def test_prefill_of_chunks_of_different_lengths(block_size):
        """Whole prompts, later parts of prompts and single tokens in one launch."""
        case = Case([40, 1, 71, 30], [40, 1, 3, 17], heads=6, block_size=block_size)
        assert_right(case.prefill(), case)

    @pytest.mark.parametrize("special, dtype", ASKED)
    def test_prefill_with_what_layers_ask_for(special, dtype):
        case = Case([60, 3, 35], [25, 3, 2], heads=6, dim=24, value_dim=40, dtype=dtype)
        special = special_of(special, 6)
        assert_right(case.prefill(**special), case, **special)

    @pytest.mark.parametrize("special, dtype", ASKED)
    def test_pools_of_int8(special, dtype):
        """Rows that nobody wrote have the scale NaN here; values are small enough to be lost in float16's weights."""
        special = special_of(special, 6)
        for splits in (1, 4):
            case = Case([70, 3], heads=6, dim=24, value_dim=40, dtype=dtype)
            case.values *= 1e-3
            case.in_int8()
            assert_right(case.decode(splits, **special), case, **special)
        case = Case([60, 3, 35], [25, 3, 2], heads=6, dim=24, value_dim=40, block_size=7, dtype=dtype).in_int8()
        assert_right(case.prefill(**special), case, **special)

    def test_what_is_not_a_number_in_int8_reaches_those_who_see_it():
        case = Case([30, 20])
        case.keys[case.rows[0][3]] = torch.inf
        right = Case([30, 20]).in_int8().decode()
        out = case.in_int8().decode()
        assert bool(out[0].isnan().all()) and torch.equal(out[1], right[1])

    @pytest.mark.parametrize("special, dtype", ASKED)
    def test_slots_are_blocks_of_the_longest_request(special, dtype):
        """One block a request, far from each other in a pool whose other rows were never written."""
        special = special_of(special, 4)
        case = Case([50, 512, 1, 70], block_size=512, spare=40, dtype=dtype)
        assert int(case.tables[:, 0].max() - case.tables[:, 0].min()) > 10
        case.tables = case.tables[:, :1]
        for splits in (1, 3):
            assert_right(case.decode(splits, **special), case, **special)
        case = Case([50, 100, 1, 70], [50, 3, 1, 20], block_size=512, spare=40, dtype=dtype)
        case.tables = case.tables[:, :1]
        assert_right(case.prefill(**special), case, **special)

    def test_blocks_that_requests_share():
        case = Case([40, 37, 64], [5, 1, 20], block_size=16, shared=2)
        assert torch.equal(case.tables[:, :2], case.tables[:1, :2].expand(3, -1))
        assert_right(case.prefill(), case)
        case = Case([40, 37, 64], block_size=16, shared=2)
        assert_right(case.decode(), case)
        assert_right(case.decode(2), case)

    @pytest.mark.parametrize("window", [1, 17, 1000])
    def test_windows_begin_where_they_should(window):
        """Keys older than the window of every query are never loaded: NaN may stand there."""
        case = Case([100, 16, 17, 200], block_size=16)
        for rows in case.rows:
            case.keys[rows[: max(0, len(rows) - window)]] = torch.nan
            case.values[rows[: max(0, len(rows) - window)]] = torch.nan
        for splits in (1, 3):
            assert_right(case.decode(splits, window=window), case, window=window)
        case = Case([16, 17, 90], [16, 1, 20], block_size=16)
        for rows, new in zip(case.rows, case.new, strict=True):
            case.keys[rows[: max(0, len(rows) - new + 1 - window)]] = torch.nan
            case.values[rows[: max(0, len(rows) - new + 1 - window)]] = torch.nan
        assert_right(case.prefill(window=window), case, window=window)

    def test_large_scores_do_not_overflow():
        for dtype in (torch.float32, torch.float16):
            case = Case([50, 7], dtype=dtype, size=100.0)  # scores of some hundreds: exp of them is infinite
            assert_right(case.decode(), case)
            assert_right(case.decode(3), case)
            case = Case([50, 7], [20, 7], dtype=dtype, size=100.0)
            assert_right(case.prefill(), case)

    def test_more_parts_than_are_merged_at_a_time():
        case = Case([90, 20], heads=2, kv_heads=1)
        case.query *= 3  # scores that differ: the highest of one tile of parts is not that of the next
        assert_right(case.decode(45), case)

    def test_a_longer_request_elsewhere_changes_nothing():
        """`longest` and the number of requests may be larger than one's own: the same numbers but for rounding."""
        case = Case([30, 300])
        right = case.decode(8)[:1]
        case.query, case.tables, case.kv_lens, case.lens = case.query[:1], case.tables[:1], case.kv_lens[:1], [30]
        torch.testing.assert_close(right, case.decode(), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("splits", [1, 3])
    @pytest.mark.parametrize("special", SPECIAL)
    def test_requests_of_length_0_get_zeros(special, splits):
        """As a batch of fixed size has them: their block tables may say anything, and nothing is read."""
        special = special_of(special, 4)
        case = Case([20, 40, 1])
        right = case.decode(splits, **special)
        for absent in ([0], [1, 2], [0, 1, 2]):
            lens, tables = case.kv_lens, case.tables
            case.kv_lens, case.tables = lens.clone(), tables.clone()
            case.kv_lens[absent], case.tables[absent] = 0, -1
            out = case.decode(splits, **special)
            present = [r for r in range(3) if r not in absent]
            assert bool((out[absent] == 0).all()) and torch.equal(out[present], right[present])
            case.kv_lens, case.tables = lens, tables

    def test_empty_batches():
        case = Case([20, 40])
        case.query, case.tables, case.kv_lens, case.starts = (
            case.query[:0], case.tables[:0], case.kv_lens[:0], case.starts[:1]
        )  # fmt: skip
        assert case.decode().shape == case.prefill().shape == (0, 4, 32)

    def test_parts_of_a_batch_and_their_strides(monkeypatch):
        """As the engine passes them: decoding requests first, then chunks, one persistent table, nothing copied."""
        case = Case([30, 20, 40, 60], [1, 1, 20, 3], heads=6)
        right = case.prefill()
        heads_first = case.query.transpose(0, 1).contiguous().transpose(0, 1)  # as models have it
        starts = case.starts[2:] - 2
        assert not heads_first.is_contiguous() and not case.tables.is_contiguous()
        shared = dict(block_size=16, scale=case.scale)
        with monkeypatch.context() as patch:
            if DEVICE == "cuda":  # the interpreter makes copies of its own
                patch.setattr(torch.Tensor, "contiguous", None)
                patch.setattr(torch.Tensor, "clone", None)
            pools = (case.keys, case.values)
            decoded = paged_decode(heads_first[:2], *pools, case.tables[:2], case.kv_lens[:2], longest=30, **shared)
            chunks = paged_prefill(
                heads_first[2:], *pools, case.tables[2:], case.kv_lens[2:], starts, most_new=20, **shared
            )
        torch.testing.assert_close(decoded, right[:2], rtol=1e-5, atol=1e-6)
        assert torch.equal(chunks, right[2:])
        case.query = case.query.transpose(1, 2).contiguous().transpose(1, 2)  # not even a head's numbers side by side
        assert torch.equal(case.prefill(), right)

    def test_equal_inputs_give_equal_bits():
        case, chunk = Case([150, 20], heads=6), Case([50, 20], [12, 20], heads=6)
        for splits in (1, 3):
            assert torch.equal(case.decode(splits), case.decode(splits))
        assert torch.equal(chunk.prefill(), chunk.prefill())

    def test_only_the_result_is_written():
        """Every number of the result, and nothing of what goes in."""
        case = Case([30, 60, 1], [7, 20, 1], heads=6)
        before = [part.clone() for part in (case.query, case.keys, case.values, case.tables)]
        out = case.prefill()
        assert not bool(out.isnan().any())
        for old, now in zip(before, (case.query, case.keys, case.values, case.tables), strict=True):
            assert torch.equal(old.nan_to_num(7.0), now.nan_to_num(7.0))

    @pytest.mark.parametrize("sms", [1, 10, 132])
    def test_splits_cover_every_context(sms):
        for requests in (1, 2, 7, 64, 300):
            for kv_heads in (1, 4, 32):
                for longest in (1, 63, 64, 65, 500, 2048, 8191, 131072):
                    splits, keys = plan_splits(requests, kv_heads, longest, sms)
                    assert (splits - 1) * keys < longest <= splits * keys and keys >= 1
                    if requests * kv_heads >= 8 * sms and longest <= 2048:
                        assert splits == 1  # enough programs without

    @pytest.mark.parametrize("memory", [64 * 1024, 99 * 1024, 227 * 1024])
    @pytest.mark.parametrize("itemsize", [2, 4])
    def test_plans_fit_the_gpu(itemsize, memory):
        for key_dim, value_dim in ((16, 16), (64, 64), (128, 128), (256, 128), (256, 256)):
            plans = [plan_decode(group, key_dim, value_dim, itemsize, memory) for group in (1, 7, 16, 71)]
            for plan in (*plans, plan_prefill(key_dim, value_dim, itemsize, memory)):
                assert plan.tile >= 16 and plan.rows >= 16 and plan.stages >= 1
                tiles = plan.tile * plan.stages * (key_dim + value_dim) * itemsize
                assert tiles + plan.rows * key_dim * itemsize < memory

    @pytest.mark.parametrize(
        "hip, major, hopper", [(None, 9, True), (None, 8, False), (None, 10, False), ("6.4.2", 9, False)]
    )
    def test_a_hopper_is_one_of_nvidias(hip, major, hopper, monkeypatch):
        """ROCm reports major 9 for AMD's gfx90a and gfx942, which have neither its instructions nor its copy engine."""
        properties = SimpleNamespace(multi_processor_count=104, shared_memory_per_block_optin=65536, major=major)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(device, "INTERPRETED", False)
        gpu = gpu_of.__wrapped__(torch.device("cuda", 0))
        assert gpu == GPU(sms=104, shared_memory=65536, hopper=hopper)
        assert gpu.multiplies_asynchronously(torch.bfloat16, 64, 4) == hopper
        for dtype, rows, warps in ((torch.float32, 64, 4), (torch.float16, 32, 4), (torch.float16, 64, 2)):
            assert not gpu.multiplies_asynchronously(dtype, rows, warps)

    @pytest.mark.parametrize(
        "change",
        [
            dict(query=lambda t: t.double()),
            dict(query=lambda t: t[0]),
            dict(query=lambda t: t[:, :3]),
            dict(keys=lambda t: t.half()),
            dict(keys=lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)),
            dict(keys=lambda t: t[..., 1:].contiguous()),
            dict(values=lambda t: t[:-1]),
            dict(block_tables=lambda t: t.long()),
            dict(block_tables=lambda t: t.T.contiguous().T),
            dict(kv_lens=lambda t: t[:1]),
            dict(kv_lens=lambda t: t.repeat_interleave(2)[::2]),
            dict(kv_lens=lambda t: t.to("meta")),
            dict(sinks=lambda t: torch.zeros(3, device=DEVICE)),
            dict(keys=lambda t: t.to(torch.int8), values=lambda t: t.to(torch.int8)),
            dict(key_scales=lambda t: torch.zeros(100, 2, device=DEVICE)),
        ],
    )
    def test_what_would_be_read_beyond_its_end_is_refused(change):
        case = Case([30, 20])
        parts = dict(query=case.query, keys=case.keys, values=case.values, block_tables=case.tables)
        parts |= dict(kv_lens=case.kv_lens, sinks=None)
        parts |= {name: f(parts.get(name)) for name, f in change.items()} | dict(block_size=16, scale=1.0)
        with pytest.raises(InvalidParameter, match="it takes query"):
            paged_decode(**parts, longest=30)
        with pytest.raises(InvalidParameter, match="it takes query"):
            paged_prefill(**parts, starts=case.starts, most_new=1)

    @pytest.mark.parametrize("change", [lambda t: t[:2], lambda t: t.long(), lambda t: t.repeat_interleave(2)[::2]])
    def test_borders_that_do_not_fit_are_refused(change):
        case = Case([30, 20])
        case.starts = change(case.starts)
        with pytest.raises(InvalidParameter, match="it takes query"):
            case.prefill()

    @pytest.mark.skipif(DEVICE == "cpu", reason="what goes wrong at times only goes wrong on the GPU")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize(
        "heads, kv_heads, dim", [(28, 4, 128), (16, 8, 128), (9, 3, 64), (8, 4, 256), (32, 32, 80), (40, 1, 128)]
    )
    def test_the_same_right_bits_again_and_again(heads, kv_heads, dim, dtype):
        """Heads as models have them, many programs at once."""
        lens = [1, 17, 128, 129, 500, 1000, 2048, 1337]
        shape = dict(heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
        for seed in range(2):
            for special in ({}, {"window": 300}):
                case = Case(lens, seed=seed, **shape)
                for splits in (None, 1, 5):
                    first = case.decode(splits, **special)
                    assert_right(first, case, **special)
                    assert all(torch.equal(first, case.decode(splits, **special)) for _ in range(30))
                case = Case(lens, [1, 17, 100, 1, 64, 200, 130, 1], seed=seed, **shape)
                first = case.prefill(**special)
                assert_right(first, case, **special)
                assert all(torch.equal(first, case.prefill(**special)) for _ in range(30))

    @pytest.mark.skipif(DEVICE == "cpu", reason="nothing is compiled for the interpreter")
    def test_where_a_batch_begins_in_its_table_compiles_nothing_anew(monkeypatch):
        import triton

        compiled = []
        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **call: compiled.append(call) and None)
        case = Case([40] * 6, [2] * 6, heads=14, kv_heads=7, dim=128, dtype=torch.float16)
        shared = dict(block_size=16, scale=case.scale)
        for first in range(6):
            query, tables, lens = case.query[2 * first :], case.tables[first:], case.kv_lens[first:]
            starts = case.starts[: 7 - first].clone()
            paged_prefill(query, case.keys, case.values, tables, lens, starts, most_new=2, **shared)
            paged_decode(query[: len(lens)], case.keys, case.values, tables, lens, longest=40, **shared)
            assert len(compiled) <= 2

    @pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs and pools of more than 2**31 numbers need the GPU")
    def test_graph_replay_and_64_bit_offsets():
        case = Case([300, 20, 1000], heads=28, kv_heads=4, dim=128, dtype=torch.bfloat16)
        case.decode(), case.decode(4)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            whole, merged = case.decode(1), case.decode(4)
        case.query.copy_(torch.randn_like(case.query))
        case.kv_lens -= 3  # the kernels read lengths and tables when they run
        graph.replay()
        assert torch.equal(whole, case.decode(1)) and torch.equal(merged, case.decode(4))

        small = Case([100, 40], [60, 1], heads=8, kv_heads=8, dim=128, dtype=torch.bfloat16)
        far = 2**31 // (8 * 128) // 16 + 5  # blocks before them: 2**31 numbers and more
        rows = far * 16 + len(small.keys)
        keys, values = (torch.empty(rows, 8, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        keys[far * 16 :], values[far * 16 :] = small.keys, small.values
        right, right_decode = small.prefill(), None
        one = Case([100, 40], heads=8, kv_heads=8, dim=128, dtype=torch.bfloat16)
        right_decode = one.decode()
        small.keys, small.values, small.tables = keys, values, small.tables + far
        assert torch.equal(small.prefill(), right)
        keys[far * 16 :], values[far * 16 :] = one.keys, one.values
        one.keys, one.values, one.tables = keys, values, one.tables + far
        assert torch.equal(one.decode(), right_decode)
