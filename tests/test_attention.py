"""`packed_attention` against attention as it stands in the paper: one softmax for one token of one head at a time."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_lib import LanguageModel
from minfer_lib.attention.batch import MOST_IDLE, Context
from minfer_lib.attention.interface import NAME, PackedBatch, attention_configs, implementation, packed_attention
from minfer_lib.cache.pool import KVPool, LayerShape
from minfer_lib.errors import UnsupportedModel

LAYER = 3  # any index will do
GARBAGE = 50.0  # in every row that belongs to nobody: finite, and far too large to go unnoticed


class Case:
    """Requests with random queries, keys and values, `requests` a list of (tokens in the cache, new tokens).

    tables: each request's blocks. Rows of the pools that belong to no request hold `GARBAGE`, the rows of a request
    that it has not reached yet hold zeros.
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
        **special: object,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.requests, self.tables, self.size, self.special = requests, tables, block_size, special
        self.group, self.heads = heads // kv_heads, heads
        blocks = num_blocks or 1 + max(block for table in tables for block in table)
        self.pool = KVPool.of(LayerShape(kv_heads, key_dim, value_dim, torch.float32), blocks * block_size, cpu())
        self.pool.keys += GARBAGE
        self.pool.values += GARBAGE
        for table in tables:
            for block in table:
                self.pool.keys[block * block_size : (block + 1) * block_size] = 0
                self.pool.values[block * block_size : (block + 1) * block_size] = 0
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
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
        return PackedBatch(
            {LAYER: self.pool}, self.size, self.tables, [new for _, new in self.requests],
            [sum(request) for request in self.requests], torch.tensor(new_rows),
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
        assert torch.equal(self.pool.keys[untouched], before[0][untouched])
        assert torch.equal(self.pool.values[untouched], before[1][untouched])
        torch.testing.assert_close(self.run(), out)  # a step that is computed again, after an interrupt, is the same


def cpu() -> torch.device:
    return torch.device("cpu")


def sinks(heads: int = 4) -> torch.Tensor:
    return torch.linspace(-2.0, 3.0, heads)


SPECIALS = {
    "plain": {},
    "scaling": dict(scaling=0.9),
    "window": dict(sliding_window=3),
    "window of one": dict(sliding_window=1),
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
def test_slots(tables: tuple[str, list[list[int]]], special: str):
    Case(MIXED, tables[1], 16, **SPECIALS[special]).check()


@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("block_size", [1, 4])
def test_several_blocks_for_a_request(block_size: int, special: str):
    free = torch.randperm(60, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[free.pop() for _ in range(-(-sum(request) // block_size))] for request in MIXED]
    Case(MIXED, tables, block_size, num_blocks=60, **SPECIALS[special]).check()


def test_one_request_alone():
    for request in [(0, 1), (0, 9), (8, 1), (3, 6)]:
        Case([request], [[2]], 9).check()


def test_decodes_alone_and_chunks_alone():
    Case([(3, 1), (9, 1), (0, 1)], [[0], [1], [2]], 10).check()
    Case([(3, 2), (0, 10), (8, 2)], [[2], [0], [1]], 10).check()


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


@settings(max_examples=80, deadline=None)
@given(cases())
def test_any_mix(case: Case):
    case.check()


# -- nobody reads what is another's -----------------------------------------------------------------------------------


@pytest.mark.parametrize("special", ["plain", "softcap", "sinks", "window"])
@pytest.mark.parametrize(
    ("tables", "block_size"),
    [
        ([[0], [1], [2], [3]], 12),
        ([[0], [2], [3], [6]], 12),  # the first stands in the way of nobody, but idle blocks lie between
        ([[0], [20], [9], [40]], 12),
        ([[0, 1, 2], [3, 4], [5, 6, 7, 8], [9]], 3),  # the tables are unequal, and block 0 is the first's
    ],
)
def test_what_is_not_a_number_stays_with_its_request(tables: list[list[int]], block_size: int, special: str):
    requests = [(7, 1), (3, 1), (11, 1), (0, 3)]
    case = Case(requests, tables, block_size, **SPECIALS[special])
    clean = case.run()
    assert torch.isfinite(clean).all()
    owned = {block for table in tables for block in table}
    for block in range(len(case.pool.keys) // block_size):
        if block in tables[0] or block not in owned:
            case.pool.keys[block * block_size : (block + 1) * block_size] = torch.nan
            case.pool.values[block * block_size : (block + 1) * block_size] = torch.nan
    out = case.run()
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1:], clean[1:])


def test_bfloat16_rounds_and_no_more():
    for special in SPECIALS.values():
        case = Case(MIXED, [[i] for i in range(7)], 16, **special)
        expected = case.expected()
        for name in ("queries", "keys", "values"):
            setattr(case, name, [part.bfloat16() for part in getattr(case, name)])
        case.pool = KVPool(case.pool.keys.bfloat16(), case.pool.values.bfloat16())
        assert case.run().dtype == torch.bfloat16
        torch.testing.assert_close(case.run().float(), expected, rtol=0.05, atol=0.05)


# -- how the blocks are read ------------------------------------------------------------------------------------------


def context(tables: list[list[int]], kv_lens: list[int], block_size: int) -> Context:
    batch = PackedBatch({}, block_size, tables, [1] * len(tables), kv_lens, torch.zeros(len(tables), dtype=torch.long))
    return batch.decode_context


def test_neighbouring_blocks_are_read_in_place():
    pool = torch.arange(5 * 4 * 2).view(5 * 4, 1, 2)
    side_by_side = context([[1], [2], [3]], [2, 3, 1], 4)
    read = side_by_side.read(pool, 4)
    assert read.shape == (3, 1, 3, 2) and read.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
    assert torch.equal(read[1, 0], pool[8:11, 0])


def test_idle_blocks_between_are_read_past_up_to_a_point():
    pool = torch.arange(9 * 4 * 2).view(9 * 4, 1, 2)
    between = context([[1], [4]], [2, 3], 4)
    assert between.rows.tolist() == [0, 3] and between.kv_lens == [2, 1, 1, 3]
    read = between.read(pool, 4)
    assert read.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
    assert torch.equal(read[between.rows][1, 0], pool[16:19, 0])
    far = context([[1], [1 + 2 * MOST_IDLE]], [2, 3], 4)
    assert far.index.tolist() == [[1], [5]] and far.rows is None
    assert torch.equal(far.read(pool, 4)[1, 0], pool[20:23, 0])


def test_blocks_in_any_order_are_put_in_order_of_position():
    pool = torch.arange(9 * 2 * 2).view(9 * 2, 1, 2)
    several = context([[3, 0, 7], [5]], [5, 2], 2)
    read = several.read(pool, 2)
    assert read.shape == (2, 1, 5, 2)
    assert read[0, 0, :, 0].tolist() == pool[[6, 7, 0, 1, 14], 0, 0].tolist()
    assert read[1, 0, :2, 0].tolist() == pool[[10, 11], 0, 0].tolist()


# -- who sees whom ----------------------------------------------------------------------------------------------------


def seen(mask: torch.Tensor) -> list[list[int]]:
    assert set(mask.unique().tolist()) <= {0.0, -torch.inf}
    return (mask == 0).int().view(-1, mask.shape[-1]).tolist()


def test_masks_by_hand():
    batch = PackedBatch({}, 8, [[0], [1], [2], [3]], [1, 1, 3, 2], [4, 2, 3, 5], torch.zeros(7, dtype=torch.long))
    assert batch.num_decodes == 2
    assert batch.decode_mask(None, torch.float32).shape == (2, 1, 1, 4)
    assert seen(batch.decode_mask(None, torch.float32)) == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert seen(batch.decode_mask(3, torch.float32)) == [[0, 1, 1, 1], [1, 1, 0, 0]]
    assert seen(batch.decode_mask(1, torch.float32)) == [[0, 0, 0, 1], [0, 1, 0, 0]]
    assert seen(batch.chunk_mask(2, None, torch.float32)) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert seen(batch.chunk_mask(3, None, torch.float32)) == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert seen(batch.chunk_mask(3, 2, torch.float32)) == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert batch.decode_mask(3, torch.bfloat16).dtype == torch.bfloat16


def test_masks_are_made_once_for_all_layers():
    batch = PackedBatch({}, 8, [[0], [1]], [1, 3], [4, 3], torch.zeros(4, dtype=torch.long))
    for window in (None, 2):
        assert batch.decode_mask(window, torch.float32) is batch.decode_mask(window, torch.float32)
        assert batch.chunk_mask(1, window, torch.float32) is batch.chunk_mask(1, window, torch.float32)
    assert batch.decode_mask(None, torch.float32) is not batch.decode_mask(2, torch.float32)


# -- the function and the model ---------------------------------------------------------------------------------------


def test_without_a_batch_it_refuses(tiny: LanguageModel):
    before = tiny.model.config._attn_implementation
    with (
        implementation(attention_configs(tiny.model), NAME),
        torch.no_grad(),
        pytest.raises(UnsupportedModel, match="without a PackedBatch"),
    ):
        tiny.model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
    assert tiny.model.config._attn_implementation == before
    with torch.no_grad():
        assert torch.isfinite(tiny.model(input_ids=torch.tensor([[1, 2]]), use_cache=False).logits).all()


def test_the_implementation_is_put_back_whatever_it_was(tiny: LanguageModel):
    own = tiny.model.config._attn_implementation
    for before in ("eager", "sdpa"):
        tiny.model.set_attn_implementation(before)
        try:
            with pytest.raises(KeyboardInterrupt), implementation(attention_configs(tiny.model), NAME):
                assert tiny.model.config._attn_implementation == NAME
                raise KeyboardInterrupt
            assert tiny.model.config._attn_implementation == before
        finally:
            tiny.model.set_attn_implementation(own)
