"""The C kernel of paged attention, against a float64 reference that follows the block tables token by token."""

import ctypes
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from minfer_lib.errors import InvalidParameter
from minfer_lib.kernels import compiled, compiled_attention
from minfer_lib.kernels.compiled_attention import CALL, compiled_decode, why_not

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a step, relative
needs_kernel = pytest.mark.skipif(
    why_not(torch.float32) is not None, reason=f"no kernel here: {why_not(torch.float32)}"
)


@dataclass
class Case:
    """What a call needs, in the order of its arguments.

    Blocks lie in any order and some belong to nobody. The block tables are a slice of a wider table, and a row of them
    goes on behind its request's blocks with others of the pool.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    block_size: int
    scale: float
    special: dict = field(default_factory=dict)

    def run(self) -> torch.Tensor:
        tensors = (self.query, self.keys, self.values, self.tables, self.lengths)
        return compiled_decode(*tensors, block_size=self.block_size, scale=self.scale, **self.special)

    def of(self, requests: list[int]) -> "Case":
        """The same for some of the requests."""
        return replace(self, query=self.query[requests], tables=self.tables[requests], lengths=self.lengths[requests])

    def own_rows(self) -> torch.Tensor:
        """Which rows of the pools hold a token of somebody."""
        own = torch.zeros(len(self.keys), dtype=torch.bool)
        for r in range(len(self.lengths)):
            own[self.rows(r)] = True
        return own

    def rows(self, r: int) -> torch.Tensor:
        position = torch.arange(int(self.lengths[r]))
        return self.tables[r].long()[position // self.block_size] * self.block_size + position % self.block_size


def make(
    lengths: list[int],
    *,
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 16,
    value_dim: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    sinks: bool = False,
    spare: int = 3,
    seed: int = 0,
    **special,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in lengths]
    blocks = torch.randperm(sum(counts) + spare, generator=g).int()
    wide = torch.full((len(lengths), max(counts) + 7), 10**6, dtype=torch.int32)
    tables = wide[:, : max(counts) + 2]
    tables.copy_(torch.randint(len(blocks), tables.shape, generator=g))
    begin = 0
    for r, count in enumerate(counts):
        tables[r, :count] = blocks[begin : begin + count]
        begin += count
    heads, rows = kv_heads * group, len(blocks) * block_size
    query = torch.randn(heads, len(lengths), dim, generator=g).to(dtype).transpose(0, 1)  # as transformers has it
    keys = torch.randn(rows, kv_heads, dim, generator=g).to(dtype)
    values = torch.randn(rows, kv_heads, value_dim or dim, generator=g).to(dtype)
    if sinks:
        special["sinks"] = torch.randn(heads, generator=g)
    return Case(query, keys, values, tables, torch.tensor(lengths, dtype=torch.int32), block_size, 0.3, special)


def reference(case: Case) -> torch.Tensor:
    """float64 [R, heads, value_dim], request by request, with nothing but the definition."""
    window, softcap, sinks = (case.special.get(name) for name in ("window", "softcap", "sinks"))
    out = []
    for r in range(len(case.lengths)):
        rows = case.rows(r)[-(window or len(case.keys)) :]
        group = case.query.shape[1] // case.keys.shape[1]
        keys, values = (pool[rows].double().repeat_interleave(group, 1) for pool in (case.keys, case.values))
        scores = (case.query[r].double() * keys).sum(-1).T * case.scale  # [heads, length]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], 1)
        weights = scores.softmax(-1)[:, : len(rows)]
        out.append((weights.T[:, :, None] * values).sum(0))
    return torch.stack(out)


def check(case: Case) -> None:
    found, wanted = case.run(), reference(case)
    assert found.dtype == case.query.dtype and found.shape == wanted.shape and found.is_contiguous()
    # weights are exact to a few parts in 10^6, whatever the sizes of the scores are here
    limit = EPS[case.query.dtype] * wanted.abs() * 1.01 + 4e-6
    assert ((found.double() - wanted).abs() <= limit).all(), ((found.double() - wanted).abs() - limit).max()


# -- what it computes -------------------------------------------------------------------------------------------------


@needs_kernel
@pytest.mark.parametrize("block_size", [1, 2, 7, 16, 64, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_around_every_boundary(block_size: int, dtype: torch.dtype):
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 68, 127, 129, 255, 256, 257, 300, 511, 512, 513, 700]
    check(make(lengths, block_size=block_size, dtype=dtype))
    check(make(lengths[::3], block_size=block_size, dtype=dtype, window=60, softcap=2.0, sinks=True))


@needs_kernel
@pytest.mark.parametrize("dim", [1, 3, 7, 8, 12, 24, 33, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_sizes(dim: int, dtype: torch.dtype):
    check(make([5, 70, 261], dim=dim, dtype=dtype))
    for value_dim in (1, 20, 64, 100):
        check(make([5, 70], dim=dim, value_dim=value_dim, dtype=dtype, block_size=7))


@needs_kernel
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 128])
def test_groups(group: int):
    for kv_heads in (1, 3):
        check(make([6, 90, 258], kv_heads=kv_heads, group=group, dim=24))
    check(
        make([6, 90], kv_heads=1, group=group, dim=72, value_dim=64, sinks=True, dtype=torch.bfloat16)
    )  # as MLA has it


@needs_kernel
@pytest.mark.parametrize("window", [None, 1, 5, 64, 256, 257, 10_000])
@pytest.mark.parametrize("softcap", [None, 0.5, 50.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_windows_softcaps_and_sinks(window: int | None, softcap: float | None, sinks: bool):
    check(make([1, 5, 66, 300, 600], window=window, softcap=softcap, sinks=sinks, block_size=7))


@needs_kernel
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-3, 10.0, 300.0])
def test_scores_of_any_size(size: float):
    """Up to where one key takes all of the weight, and the others' underflows."""
    case = make([5, 70, 300, 600], sinks=True)
    case.query = case.query * size
    found, wanted = case.run(), reference(case)
    # a score of some hundreds is itself known to a few parts in 10^7 of it
    assert ((found - wanted).abs() <= 5e-6 + 1e-6 * size).all()
    if size < 300:
        case.special["softcap"] = 30.0
        assert ((case.run() - reference(case)).abs() <= 2e-5).all()


@needs_kernel
def test_every_float16_and_bfloat16_is_read_and_written_as_torch_does():
    """With one token the weight is 1, and the result is its value."""
    for dtype in (torch.float16, torch.bfloat16):
        numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        values = numbers.view(16, 1, 4096)
        table = torch.arange(16, dtype=torch.int32)[:, None]
        lengths, keys = torch.ones(16, dtype=torch.int32), torch.zeros(16, 1, 4, dtype=dtype)
        for query in (torch.zeros(16, 1, 4), torch.zeros(16, 1, 4, dtype=dtype)):
            found = compiled_decode(query, keys, values, table, lengths, block_size=1, scale=1.0).flatten()
            assert torch.equal(
                found.nan_to_num(7.0, torch.inf, -torch.inf),
                numbers.to(query.dtype).nan_to_num(7.0, torch.inf, -torch.inf),
            )
    # between two float16, and beyond the last: as torch rounds
    g = torch.Generator().manual_seed(0)
    numbers = torch.randn(8192, generator=g) * 10 ** torch.empty(8192).uniform_(-9, 6, generator=g)
    numbers[:4] = torch.tensor([65519.0, 65520.0, 2.0**-25, 3 * 2.0**-25])
    query, keys, one = torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), torch.ones(1, dtype=torch.int32)
    for dtype in (torch.float16, torch.bfloat16):
        found = compiled_decode(
            query.to(dtype), keys, numbers.view(1, 1, -1), one[:, None] * 0, one, block_size=1, scale=1.0
        )
        assert torch.equal(found.flatten(), numbers.to(dtype))


@needs_kernel
@pytest.mark.parametrize("special", [{}, {"window": 60, "softcap": 2.0, "sinks": True}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_are_blocks_of_the_longest_request(dtype: torch.dtype, special: dict):
    """One block a request, far from each other in a pool whose other rows were never written."""
    case = make([50, 2048, 1, 700], block_size=2048, spare=40, dtype=dtype, **special)
    assert int(case.tables[:, 0].max() - case.tables[:, 0].min()) > 20
    case.tables = case.tables[:, :1]
    case.keys[~case.own_rows()] = case.values[~case.own_rows()] = torch.nan
    check(case)


@needs_kernel
@pytest.mark.parametrize("special", [{}, {"sinks": True}, {"window": 5, "softcap": 2.0, "sinks": True}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_requests_of_length_0_get_zeros(dtype: torch.dtype, special: dict):
    """As a batch of fixed size has them: their block tables may say anything, and nothing is read."""
    case = make([300, 40, 1, 20], dtype=dtype, **special)
    wanted = case.run()
    for absent in ([0], [1, 2], [3], [0, 1, 2, 3]):
        lengths, tables = case.lengths.clone(), case.tables.clone()
        lengths[absent], tables[absent] = 0, -1
        found = replace(case, lengths=lengths, tables=tables).run()
        present = [r for r in range(4) if r not in absent]
        assert (found[absent] == 0).all() and torch.equal(found[present], wanted[present])


# -- what it does not depend on ---------------------------------------------------------------------------------------


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_company_and_threads_change_no_bit(dtype: torch.dtype, window: int | None, group: int):
    case = make([700, 1, 64, 257, 30, 1300, 256], dtype=dtype, group=group, dim=64, window=window, sinks=True)
    together = case.run()
    for r in range(len(together)):
        assert torch.equal(case.of([r]).run()[0], together[r])
    assert torch.equal(case.of([5, 1, 0]).run(), together[[5, 1, 0]])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for _ in range(3):
                assert torch.equal(case.run(), together)
    finally:
        torch.set_num_threads(before)


@needs_kernel
def test_block_size_changes_no_bit():
    lengths, g = [300, 17, 64], torch.Generator().manual_seed(0)
    tokens = [torch.randn(2, n, 2, 24, generator=g) for n in lengths]
    query, found = torch.randn(3, 6, 24, generator=g), []
    for block_size in (1, 2, 7, 16, 64, 512, 2048):
        case = make(lengths, dim=24, block_size=block_size)
        case.query = query
        for r, (keys, values) in enumerate(tokens):
            case.keys[case.rows(r)], case.values[case.rows(r)] = keys, values
        found.append(case.run())
    assert all(torch.equal(other, found[0]) for other in found)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [33, 64])
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
@pytest.mark.parametrize("special", [{}, {"softcap": 2.0, "sinks": True}])
def test_rows_that_are_not_a_requests_own_have_no_effect(dtype: torch.dtype, dim: int, garbage: float, special: dict):
    case = make([1, 3, 5, 63, 66, 300], dtype=dtype, dim=dim, **special)
    wanted = case.run()
    case.keys[~case.own_rows()] = garbage
    case.values[~case.own_rows()] = garbage
    assert torch.equal(case.run(), wanted)
    # nor what is outside of the window, its blocks included: they may belong to others by now
    case.special["window"] = 40
    wanted = case.run()
    for r in range(6):
        case.keys[case.rows(r)[:-40]] = case.values[case.rows(r)[:-40]] = garbage
    case.tables[5, : (300 - 40) // 16] = -1
    assert torch.equal(case.run(), wanted)


@needs_kernel
@pytest.mark.parametrize("where", ["query", "keys", "values"])
def test_nan_of_ones_own_spoils_only_the_request(where: str):
    case = make([5, 300, 64])
    wanted = case.run()
    if where == "query":
        case.query[1, :, 3] = torch.nan
    else:
        getattr(case, where)[case.rows(1)[10]] = torch.nan
    found = case.run()
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], wanted[[0, 2]])


@needs_kernel
def test_keys_that_are_infinite():
    """One whose score is -inf has no weight, wherever it stands; a score of +inf leaves NaN, as in any softmax."""
    for length, at in ((70, 0), (70, 69), (600, 0), (600, 300)):
        case = make([length], kv_heads=1, group=1)
        case.query[0, 0, 0] = 1.0
        case.keys[case.rows(0)[at], 0, 0] = -torch.inf
        found = case.run()
        assert found.isfinite().all() and ((found - reference(case)).abs() < 4e-6).all()
        case.keys[case.rows(0)[at], 0, 0] = torch.inf
        assert case.run().isnan().all()
    case = make([300], kv_heads=1, group=1)  # a whole piece without any weight
    case.query[0, 0, 0] = 1.0
    case.keys[case.rows(0)[:256], 0, 0] = -torch.inf
    assert ((case.run() - reference(case)).abs() < 4e-6).all()
    case.special["sinks"] = torch.tensor([-torch.inf])
    assert ((case.run() - reference(case)).abs() < 4e-6).all()


@needs_kernel
def test_layouts_of_the_arguments(monkeypatch: pytest.MonkeyPatch):
    case = make([5, 40, 70], sinks=True)
    wanted = case.run()
    apart = torch.zeros(3, 6, 40)
    apart[..., 1:33:2] = case.query  # not even the numbers of a head side by side
    assert torch.equal(replace(case, query=apart[..., 1:33:2]).run(), wanted)
    assert case.of([]).run().shape == (0, 6, 16)
    check(replace(case, query=case.query.bfloat16()))  # a query may be of another dtype than the pools

    wide = torch.zeros(5, 9, 24)
    wide[:3, 2:8, :16] = case.query
    lengths = torch.tensor([99, 99, *case.lengths.tolist(), 99], dtype=torch.int32)
    same = replace(case, lengths=lengths[2:5])
    queries = (case.query, wide[:3, 2:8, :16], case.query.contiguous().requires_grad_())
    assert not case.query.is_contiguous() and not case.tables.is_contiguous()
    for copy in ("contiguous", "clone"):  # strides are honoured as they are
        monkeypatch.setattr(torch.Tensor, copy, None)
    assert all(torch.equal(replace(same, query=query).run(), wanted) for query in queries)


# -- what it refuses --------------------------------------------------------------------------------------------------


FITS = "it takes query"


@needs_kernel
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(96, 2, 15)}, FITS),
        ({"values": torch.zeros(95, 2, 16)}, FITS),
        ({"keys": torch.zeros(96, 4, 16), "values": torch.zeros(96, 4, 16)}, FITS),
        ({"keys": torch.zeros(96, 16)}, FITS),
        ({"query": torch.zeros(6, 16)}, FITS),
        ({"query": torch.zeros(2, 6, 16, dtype=torch.float64)}, FITS),
        ({"query": torch.zeros(2, 6, 16, device="meta")}, FITS),
        ({"values": torch.zeros(96, 2, 16).half()}, FITS),
        ({"keys": torch.zeros(2, 96, 16).transpose(0, 1)}, FITS),
        ({"keys": torch.zeros(96, 2, 16, dtype=torch.float64)}, "the kernel reads `float32`, `bfloat16` or `float16`"),
        ({"tables": torch.zeros(2, 3, dtype=torch.int64)}, FITS),
        ({"tables": torch.zeros(3, 3, dtype=torch.int32)}, FITS),
        ({"tables": torch.zeros(3, 2, dtype=torch.int32).T}, FITS),
        ({"lengths": torch.ones(2)}, FITS),
        ({"lengths": torch.ones(3, dtype=torch.int32)}, FITS),
        ({"lengths": torch.ones(2, 2, dtype=torch.int32)[:, 0]}, FITS),
        ({"special": {"sinks": torch.zeros(5)}}, FITS),
        ({"lengths": torch.tensor([-1, 5], dtype=torch.int32)}, "kv_lens from -1"),
        ({"lengths": torch.tensor([5, 49], dtype=torch.int32)}, "has 0 to 48"),
        ({"keys": torch.zeros(90, 2, 16), "values": torch.zeros(90, 2, 16)}, "blocks from 0 to 5: .* 0 to 4"),
        ({"tables": torch.tensor([[0, 0, 0], [1, 6, 0]], dtype=torch.int32)}, "blocks from 0 to 6: .* 0 to 5"),
        ({"tables": torch.tensor([[-1, 0, 0], [1, 2, 0]], dtype=torch.int32)}, "blocks from -1 to 2"),
    ],
)
def test_arguments_that_do_not_fit(change: dict, message: str):
    """What would be read beyond its end."""
    case = make([7, 40])
    assert len(case.keys) == 112  # 7 blocks
    case.keys, case.values = case.keys[:96], case.values[:96]
    case.tables = torch.tensor([[0, 0, 0], [1, 2, 5]], dtype=torch.int32)
    case.run()
    with pytest.raises(InvalidParameter, match=message):
        replace(case, **change).run()


def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINFER_CC", "")
    for module, name in ((compiled, "library"), (compiled_attention, "c_function"), (compiled_attention, "why_not")):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)  # as in a process that begins
    assert compiled_attention.why_not(torch.float32) == "MINFER_CC is empty"
    with pytest.raises(InvalidParameter, match=r"cannot run over torch.float32 here: MINFER_CC is empty"):
        make([5]).run()


def test_other_dtypes_are_not_usable():
    assert "`float16`" in why_not(torch.float64)


# -- what the kernel's check of itself refuses ------------------------------------------------------------------------


def refused(function: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes for which the kernel would not be used."""
    monkeypatch.setattr(compiled_attention, "c_function", lambda: function)
    reasons = {dtype: why_not.__wrapped__(dtype) for dtype in DTYPES}
    assert set(reasons.values()) <= {None, "its results are wrong on this CPU"}
    return [dtype for dtype in DTYPES if reasons[dtype]]


FIELDS = "query keys values out tables lengths sinks key_scales value_scales requests heads kv_heads key_dim value_dim"
FIELDS = f"{FIELDS} query_step head_step table_step table_width blocks block_size window scale softcap".split()
FIELDS += ["query_kind", "pool_kind"]


@needs_kernel
@pytest.mark.parametrize(
    "change",
    [
        lambda call: call | {"requests": 0},  # writes nothing, and what was there before may be right by chance
        lambda call: call | {"requests": call["requests"] - 1},
        lambda call: call | {"sinks": None},
        lambda call: call | {"softcap": 0.0},
        lambda call: call | {"softcap": call["softcap"] * 1.0001},
        lambda call: call | {"scale": call["scale"] * 1.0001},
        lambda call: call | {"window": call["window"] + 1},
        lambda call: call | {"window": call["window"] - 1},
        lambda call: call | {"head_step": 0},
        lambda call: call | {"table_step": 0},
        lambda call: call | {"keys": call["values"]},
        lambda call: call | {"values": call["values"] + 4},
    ],
)
def test_a_kernel_that_reads_its_arguments_wrongly_is_not_used(change: Callable, monkeypatch: pytest.MonkeyPatch):
    right = compiled_attention.c_function()

    def wrong(call: bytes) -> int:
        changed = change(dict(zip(FIELDS, CALL.unpack(call), strict=True)))
        return right(CALL.pack(*(value or 0 for value in changed.values())))

    assert refused(right, monkeypatch) == []
    assert refused(wrong, monkeypatch) == DTYPES


@needs_kernel
def test_a_kernel_whose_numbers_are_all_a_little_off_is_not_used(monkeypatch: pytest.MonkeyPatch):
    """By one in the last digit of a half precision, and in float32 by what no order of the sums explains."""
    right = compiled_attention.c_function()

    def wrong(call: bytes) -> int:
        code, fields = right(call), dict(zip(FIELDS, CALL.unpack(call), strict=True))
        count, single = fields["requests"] * fields["heads"] * fields["value_dim"], fields["query_kind"] == 0
        numbers = ((ctypes.c_float if single else ctypes.c_int16) * count).from_address(fields["out"])
        for i in range(count):
            numbers[i] += 1e-5 if single else 1
        return code

    assert refused(wrong, monkeypatch) == DTYPES


def build(source: str, options: list[str], folder: Path) -> Callable[[bytes], int]:
    (folder / "paged_decode.c").write_text(source)
    command = [os.environ.get("MINFER_CC", "cc"), *compiled.COMMON, "-O1", *options, "-shared", "paged_decode.c", "-lm"]
    subprocess.run([*command, "-o", "paged_decode.so"], cwd=folder, check=True, capture_output=True)
    return ctypes.CDLL(str(folder / "paged_decode.so")).paged_decode


HEADER, KERNEL = (
    (Path(compiled_attention.__file__).parent / "c" / name).read_text(encoding="utf-8")
    for name in ("vectors.h", "paged_decode.c")
)
SOURCE = KERNEL.replace('#include "vectors.h"', HEADER)


@needs_kernel
@pytest.mark.parametrize(
    ("line", "wrong", "dtypes"),
    [
        ("products(kind, 1, query, key_dim, key", "products(kind, 1, query, key_dim - LANES, key", DTYPES),
        ("products(kind, 2, query, key_dim, key", "products(kind, 2, query, key_dim - LANES, key", DTYPES),
        ("heads, 2, weights, shrink, value, count,", "heads, 2, weights, shrink, value, count - 1,", DTYPES),
        ("s[h][c] = floats_at(sums + h * padded(dim) + i + c * LANES) * shrink[h]", "s[h][c] = all(0)", DTYPES),
        ("(size_t)((end - i) * size_of(kind))", "(size_t)((end - i - 1) * size_of(kind))", DTYPES),
        ("s->total = s->total * a + t->total * b", "s->total = s->total + t->total * b", DTYPES),
        ("bits + 0x7fffu + (bits >> 16 & 1)", "bits", [torch.bfloat16]),
        ("+ 0xfffu + (size >> 13 & 1)", "", [torch.float16]),
        ("scores[t] *= key_scales[first + t]", "scores[t] *= key_scales[t]", DTYPES),
        ("scores[t] *= value_scales[first + t]", "scores[t] *= value_scales[t]", DTYPES),
        ("c->value_scales[row + head]", "c->value_scales[row]", DTYPES),
    ],
)  # fmt: skip
def test_a_kernel_that_a_compiler_got_wrong_is_not_used(
    line: str, wrong: str, dtypes: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On a path that only some head sizes, groups, lengths or dtypes take."""
    assert SOURCE.count(line) == 1
    assert refused(build(SOURCE.replace(line, wrong), [], tmp_path), monkeypatch) == dtypes


@needs_kernel
@pytest.mark.parametrize("options", [[], ["-march=native", "-mno-f16c"]])
def test_cpus_with_less(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Narrower vectors, and no instruction for float16: what this machine has, switched off for the compiler."""
    command = [os.environ.get("MINFER_CC", "cc"), *options, "-E", "-x", "c", os.devnull]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip(f"the compiler does not know {options}")
    assert refused(build(SOURCE, options, tmp_path), monkeypatch) == []
