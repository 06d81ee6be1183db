"""Attention of each backend against attention as it stands in the paper: one softmax for a token of a head at a time.

Whatever does not belong to a request is NaN in all of these tests: nothing may read it.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_lib import LanguageModel
from minfer_lib.attention.backends import AttentionBackend, CompiledBackend
from minfer_lib.attention.batch import PackedBatch
from minfer_lib.attention.interface import NAME, packed_attention
from minfer_lib.attention.support import batch_of
from minfer_lib.attention.torch_backend import TorchBackend, _chunk_mask, _decode_rows
from minfer_lib.attention.view import view_of
from minfer_lib.cache.pool import KVPool, LayerShape
from minfer_lib.errors import UnsupportedModel
from minfer_lib.kernels.compiled_attention import why_not

LAYER = 3  # any index will do
CPU = torch.device("cpu")
BACKENDS = [
    TorchBackend(),
    pytest.param(
        CompiledBackend(), marks=pytest.mark.skipif(why_not(torch.float32) is not None, reason="no C compiler")
    ),
]
backends = pytest.mark.parametrize("backend", BACKENDS, ids=["torch", "compiled"])


class Case:
    """Requests with random queries, keys and values, `requests` a list of (tokens in the cache, new tokens).

    tables: each request's blocks. All rows of the pools but those of tokens are NaN, those of a request's last block
    that it has not reached yet included; the last block of the pools, the trash block, holds zeros. Entries of the
    block tables behind a request's own blocks point anywhere.
    """

    def __init__(
        self,
        requests: list[tuple[int, int]],
        tables: list[list[int]],
        block_size: int,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        key_dim: int = 8,
        value_dim: int = 8,
        num_blocks: int | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        backend: AttentionBackend | None = None,
        **special: object,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.requests, self.tables, self.size, self.special = requests, tables, block_size, special
        self.group, self.heads, self.backend = heads // kv_heads, heads, backend or TorchBackend()
        blocks = 1 + (num_blocks or 1 + max(block for table in tables for block in table))
        self.pool = KVPool.of(LayerShape(kv_heads, key_dim, value_dim, dtype), blocks * block_size, CPU)
        self.pool.keys[:-block_size] = self.pool.values[:-block_size] = torch.nan
        draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
        self.queries = [draw(new, heads, key_dim) for _, new in requests]
        self.keys = [draw(old + new, kv_heads, key_dim) for old, new in requests]
        self.values = [draw(old + new, kv_heads, value_dim) for old, new in requests]
        for i, (old, _) in enumerate(requests):
            rows = self.rows(i)[:old]
            self.pool.keys[rows], self.pool.values[rows] = self.keys[i][:old], self.values[i][:old]

    def rows(self, i: int) -> list[int]:
        """Rows of the pools of one request's tokens."""
        return [self.tables[i][p // self.size] * self.size + p % self.size for p in range(sum(self.requests[i]))]

    def batch(self) -> PackedBatch:
        new_rows = [row for i, (old, _) in enumerate(self.requests) for row in self.rows(i)[old:]]
        width = 2 + max(map(len, self.tables))
        anywhere = [2**30, -7, 0, 10**6, -1]
        tables = [table + [anywhere[i % 5] for i in range(len(table), width)] for table in self.tables]
        return batch_of(
            {LAYER: self.pool}, self.size, tables, [new for _, new in self.requests],
            [sum(request) for request in self.requests], new_rows, CPU, self.backend,
        )  # fmt: skip

    def run(self, batch: PackedBatch | None = None) -> torch.Tensor:
        """[T, heads, value_dim]."""
        row = lambda parts: torch.cat(parts).transpose(0, 1)[None]  # noqa: E731  [1, heads, T, dim]
        new = [old for old, _ in self.requests]
        out, weights = packed_attention(
            SimpleNamespace(layer_idx=LAYER), row(self.queries),
            row([k[n:] for k, n in zip(self.keys, new, strict=True)]),
            row([v[n:] for v, n in zip(self.values, new, strict=True)]),
            None, minfer=batch or self.batch(), **self.special,
        )  # fmt: skip
        assert weights is None and out.shape[0] == 1
        return out[0]

    def expected(self) -> torch.Tensor:
        """The same, written out in float64."""
        scale = self.special.get("scaling") or self.queries[0].shape[-1] ** -0.5
        window, softcap, sinks = (self.special.get(name) for name in ("sliding_window", "softcap", "s_aux"))
        result = []
        for (old, new), queries, keys, values in zip(self.requests, self.queries, self.keys, self.values, strict=True):
            for t in range(new):
                first = 0 if window is None else max(0, old + t + 1 - window)
                for head in range(self.heads):
                    seen = keys[first : old + t + 1, head // self.group].double()
                    scores = seen @ queries[t, head].double() * scale
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    top = scores.exp()
                    below = top.sum() + (0 if sinks is None else sinks[head].double().exp())
                    result.append((top / below) @ values[first : old + t + 1, head // self.group].double())
        return torch.stack(result).view(-1, self.heads, values.shape[-1]).float()

    def check(self) -> None:
        before = self.pool.keys.clone(), self.pool.values.clone()
        batch = self.batch()
        out = self.run(batch)
        torch.testing.assert_close(out, self.expected(), rtol=1e-4, atol=1e-5)
        for i in range(len(self.requests)):  # the new keys are where they belong
            torch.testing.assert_close(self.pool.keys[self.rows(i)], self.keys[i], rtol=0, atol=0)
            torch.testing.assert_close(self.pool.values[self.rows(i)], self.values[i], rtol=0, atol=0)
        untouched = torch.ones(len(before[0]), dtype=torch.bool)
        untouched[batch.slot_mapping] = False
        for store, old in zip((self.pool.keys, self.pool.values), before, strict=True):
            torch.testing.assert_close(store[untouched], old[untouched], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(self.run(), out)  # a step that is computed again, after an interrupt, is the same


def sinks(heads: int = 4) -> torch.Tensor:
    return torch.linspace(-2.0, 3.0, heads)


SPECIALS = {
    "plain": {},
    "scaling": dict(scaling=0.9),
    "window": dict(sliding_window=3),
    "window of one": dict(sliding_window=1),
    "window as long as a prompt": dict(sliding_window=12),
    "window shorter than a prompt by one": dict(sliding_window=11),
    "window longer than all": dict(sliding_window=100),
    "softcap": dict(softcap=1.5),
    "sinks": dict(s_aux=sinks()),
    "window, softcap, sinks": dict(sliding_window=4, softcap=2.0, s_aux=sinks(), scaling=0.7),
    "values of another size": dict(value_dim=5),
    "values of another size, sinks": dict(value_dim=12, s_aux=sinks()),
    "no groups": dict(kv_heads=4),
    "groups of three": dict(heads=6, kv_heads=2),
    "groups of three, sinks": dict(heads=6, kv_heads=2, s_aux=sinks(6), sliding_window=5),
    "one head of keys": dict(kv_heads=1, softcap=3.0),
}
# (tokens in the cache, new tokens): decodes, first tokens of a prompt, chunks with and without a history
MIXED = [(4, 1), (0, 1), (11, 1), (0, 5), (6, 4), (1, 2), (0, 12)]


@backends
@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize(
    "tables",
    {
        "side by side": [[i] for i in range(7)],
        "idle blocks between the decodes": [[1], [3], [5], [0], [2], [4], [9]],
        "far apart": [[20], [2], [11], [5], [9], [30], [0]],
    }.items(),
    ids=lambda item: item[0],
)
def test_slots(tables: tuple[str, list[list[int]]], special: str, backend: AttentionBackend):
    Case(MIXED, tables[1], 16, backend=backend, **SPECIALS[special]).check()


@backends
@pytest.mark.parametrize("special", SPECIALS)
def test_slots_of_the_usual_length_far_from_each_other(special: str, backend: AttentionBackend):
    Case(MIXED, [[30], [2], [11], [5], [9], [21], [0]], 2048, backend=backend, **SPECIALS[special]).check()


@backends
@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("block_size", [1, 4])
def test_several_blocks_for_a_request(block_size: int, special: str, backend: AttentionBackend):
    free = torch.randperm(60, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[free.pop() for _ in range(-(-sum(request) // block_size))] for request in MIXED]
    Case(MIXED, tables, block_size, num_blocks=60, backend=backend, **SPECIALS[special]).check()


@backends
def test_one_request_alone(backend: AttentionBackend):
    for request in [(0, 1), (0, 9), (8, 1), (3, 6)]:
        Case([request], [[2]], 9, backend=backend).check()


@backends
def test_decodes_alone_and_chunks_alone(backend: AttentionBackend):
    Case([(3, 1), (9, 1), (0, 1)], [[0], [1], [2]], 10, backend=backend).check()
    Case([(3, 2), (0, 10), (8, 2)], [[2], [0], [1]], 10, backend=backend).check()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    decodes = draw(st.lists(st.tuples(st.integers(0, 14), st.just(1)), max_size=5))
    chunks = draw(st.lists(st.tuples(st.integers(0, 8), st.integers(2, 7)), max_size=3))
    requests = [*decodes, *chunks] or [(0, 1)]
    block_size = draw(st.sampled_from([1, 2, 3, 15, 16]))
    needed = [-(-sum(request) // block_size) for request in requests]
    free = draw(st.permutations(range(sum(needed) + draw(st.integers(0, 9)))))
    tables = [list(free[sum(needed[:i]) : sum(needed[: i + 1])]) for i in range(len(requests))]
    kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    special = dict(
        sliding_window=draw(st.none() | st.integers(1, 16)),
        softcap=draw(st.none() | st.just(1.5)),
        s_aux=draw(st.none() | st.just(sinks(kv_heads * group))),
    )
    return Case(
        requests, tables, block_size, heads=kv_heads * group, kv_heads=kv_heads, num_blocks=len(free),
        value_dim=draw(st.sampled_from([3, 8])), seed=draw(st.integers(0, 9)), **special,
    )  # fmt: skip


@backends
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_any_mix(case: Case, backend: AttentionBackend):
    case.backend = backend
    case.check()


# -- nobody reads what is another's -----------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("special", ["plain", "softcap", "sinks", "window"])
@pytest.mark.parametrize(
    ("tables", "block_size"),
    [
        ([[0], [1], [2], [3]], 12),
        ([[0], [2], [3], [6]], 12),
        ([[0], [20], [9], [40]], 12),
        ([[0, 1, 2], [3, 4], [5, 6, 7, 8], [9]], 3),  # the tables are unequal, and block 0 is the first's
    ],
)
def test_what_is_not_a_number_stays_with_its_request(
    tables: list[list[int]], block_size: int, special: str, backend: AttentionBackend
):
    requests = [(7, 1), (3, 1), (11, 1), (0, 3)]
    for i in range(len(requests)):
        case = Case(requests, tables, block_size, backend=backend, **SPECIALS[special])
        clean = case.run()
        assert torch.isfinite(clean).all()
        case.keys[i][:], case.values[i][:] = torch.nan, torch.nan
        case.pool.keys[case.rows(i)] = case.pool.values[case.rows(i)] = torch.nan
        out = case.run()
        mine = torch.tensor([r for r, (_, new) in enumerate(requests) for _ in range(new)]) == i
        assert out[mine].isnan().all()
        torch.testing.assert_close(out[~mine], clean[~mine])


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_and_no_more(backend: AttentionBackend, dtype: torch.dtype):
    if isinstance(backend, CompiledBackend) and why_not(dtype):
        pytest.skip(why_not(dtype))
    for special in SPECIALS.values():
        case = Case(MIXED, [[i] for i in range(7)], 16, dtype=dtype, backend=backend, **special)
        out = case.run()
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), case.expected(), rtol=0.05, atol=0.05)


# -- who sees whom ----------------------------------------------------------------------------------------------------


def seen(mask: torch.Tensor) -> list[list[int]]:
    assert set(mask.unique().tolist()) <= {0.0, -torch.inf}
    return (mask == 0).int().view(-1, mask.shape[-1]).tolist()


def masks_of(q_lens: list[int], kv_lens: list[int]) -> PackedBatch:
    pools = {0: KVPool.of(LayerShape(1, 1, 1, torch.float32), 8 * (len(q_lens) + 1), CPU)}
    tables = [[i] for i in range(len(q_lens))]
    return batch_of(pools, 8, tables, q_lens, kv_lens, [0] * sum(q_lens), CPU)


def test_masks_by_hand():
    batch = masks_of([1, 1, 3, 2], [4, 2, 3, 5])
    assert batch.num_decodes == 2 and batch.starts.tolist() == [0, 3, 5] and batch.trash_row == 39

    def decodes(window: int | None) -> torch.Tensor:
        return _decode_rows(batch, window, torch.float32)[1]

    def chunk(row: int, window: int | None, group: int = 1) -> torch.Tensor:
        return _chunk_mask(batch, row, window, torch.float32, group)

    assert decodes(None).shape == (2, 1, 1, 4)
    assert seen(decodes(None)) == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert seen(decodes(3)) == [[0, 1, 1, 1], [1, 1, 0, 0]]
    assert seen(decodes(1)) == [[0, 0, 0, 1], [0, 1, 0, 0]]
    assert _decode_rows(batch, None, torch.float32)[0].tolist() == [0, 1, 2, 3, 8, 9, 39, 39]  # the trash row
    assert seen(chunk(2, None)) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert seen(chunk(3, None)) == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert seen(chunk(3, 2)) == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert seen(chunk(3, 2, group=2)) == 2 * [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert _decode_rows(batch, 3, torch.bfloat16)[1].dtype == torch.bfloat16


def test_masks_are_made_once_for_all_layers():
    case = Case([(3, 1), (0, 3), (2, 3)], [[0], [1], [2]], 8, sliding_window=2)
    batch = case.batch()
    case.run(batch)
    first = dict(batch.derived)
    case.run(batch)
    assert len(first) > 0 and batch.derived.keys() == first.keys()
    assert all(batch.derived[key] is first[key] for key in first)
    assert _decode_rows(batch, None, torch.float32)[1] is not _decode_rows(batch, 2, torch.float32)[1]


# -- the function and the model ---------------------------------------------------------------------------------------


def test_without_a_batch_it_refuses(tiny: LanguageModel):
    before, ids = copy.deepcopy(tiny.model.config), torch.tensor([[1, 2]])
    with torch.no_grad(), pytest.raises(UnsupportedModel, match="without a PackedBatch"):
        view_of(tiny.model, NAME)(input_ids=ids, use_cache=False)
    assert tiny.model.config._attn_implementation == before._attn_implementation != NAME
    with torch.no_grad():
        assert torch.isfinite(tiny.model(input_ids=ids, use_cache=False).logits).all()


def test_a_mask_is_refused(tiny: LanguageModel):
    """The batch says who sees whom: a mask would be ignored, in silence."""
    case = Case([(3, 1)], [[0]], 8)
    query = torch.zeros(1, 4, 1, 8)
    with pytest.raises(UnsupportedModel, match="was given a mask"):
        packed_attention(SimpleNamespace(layer_idx=LAYER), query, query[:, :2], query[:, :2], torch.zeros(1, 1, 1, 4),
                         minfer=case.batch())  # fmt: skip
    ids = torch.tensor([[1]])
    with torch.no_grad(), pytest.raises(UnsupportedModel, match="was given a mask"):
        view_of(tiny.model, NAME)(
            input_ids=ids, attention_mask=torch.zeros(1, 1, 1, 1), use_cache=False, minfer=case.batch()
        )
