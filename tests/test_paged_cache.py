"""The paged cache, row by row: what a table leads to, who shares it, what is copied, found again and evicted."""

import hashlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from minfer_lib.cache.paged import PagedKVCache, block_key
from minfer_lib.cache.pool import NO_PREFIX, BlockTable, LayerShape
from minfer_lib.cache.slots import SlotKVCache
from minfer_lib.errors import InvariantBroken

SIZE = 4
CPU = torch.device("cpu")
# Three layers of two shapes, keys and values of different sizes: as latent attention has them.
WIDE = LayerShape(2, 3, 5, torch.float32)
NARROW = LayerShape(1, 4, 2, torch.bfloat16)
LAYERS = {0: WIDE, 1: NARROW, 3: WIDE}


@dataclass(eq=False)
class Owner:
    """A request, as far as the cache is concerned."""

    ids: list[int] = field(default_factory=list)
    table: BlockTable | None = None
    num_computed: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def tokens(self, begin: int, end: int) -> list[int]:
        return self.ids[begin:end]


def make(blocks: int = 8, size: int = SIZE, layers: dict[int, LayerShape] | None = None, **options) -> PagedKVCache:
    return PagedKVCache(LAYERS if layers is None else layers, blocks, size, CPU, **options)


def join(cache: PagedKVCache, ids: list[int], tokens: int | None = None, reserve: int = 0) -> Owner:
    """A request that takes over what it finds, computes all of its tokens or the first so many, and stays."""
    owner = Owner(ids)
    prefix = cache.find_prefix(owner)
    tokens = len(ids) if tokens is None else tokens
    assert cache.allocate(owner, tokens, prefix=prefix, reserve=reserve)
    compute(cache, owner, prefix.tokens, tokens)
    return owner


def compute(cache: PagedKVCache, owner: Owner, begin: int, end: int) -> None:
    write(cache, owner, begin, end)
    owner.num_computed = end
    cache.cache_blocks(owner)


def write(cache: PagedKVCache, owner: Owner, begin: int, end: int) -> None:
    """Fills rows with what depends on layer, on the token and on whether it is a key, as a model would."""
    rows = torch.tensor([owner.table.row(p) for p in range(begin, end)])
    for layer, pool in cache.pools.items():
        for sign, store in ((1, pool.keys), (-1, pool.values)):
            marks = [sign * (100 * layer + owner.ids[p] + 1) for p in range(begin, end)]
            new = torch.tensor(marks, dtype=store.dtype)[:, None, None].expand(-1, *store.shape[1:])
            store.index_copy_(0, rows, new.contiguous())


def holds(cache: PagedKVCache, owner: Owner, tokens: int) -> bool:
    """Whether the first so many tokens lie where the table says, in all layers, keys and values."""
    for layer, pool in cache.pools.items():
        for sign, store in ((1, pool.keys), (-1, pool.values)):
            for position in range(tokens):
                mark = torch.tensor(sign * (100 * layer + owner.ids[position] + 1), dtype=store.dtype)
                if not (store[owner.table.row(position)] == mark).all():
                    return False
    return True


def poison(cache: PagedKVCache) -> None:
    """What anybody may have left in any block."""
    for pool in cache.pools.values():
        pool.keys.fill_(torch.nan), pool.values.fill_(torch.inf)


def state(cache: PagedKVCache, owners: list[Owner]) -> tuple:
    tables = [o.table and (list(o.table.blocks), list(o.table.keys), o.table.index, o.table.capacity) for o in owners]
    stores = tuple(t.tolist() for pool in cache.pools.values() for t in (pool.keys, pool.values))
    references = [cache.allocator.references(b) for b in range(cache.num_blocks)]
    return tables, cache.allocator.cached, references, cache.bytes_copied, cache.tables.tolist(), stores


# -- layout -----------------------------------------------------------------------------------------------------------


def test_pools_of_layers_of_different_shapes():
    cache = make(blocks=5, size=3)
    assert cache.pools.keys() == LAYERS.keys() and cache.trash_row == 15
    for index, shape in LAYERS.items():
        pool = cache.pools[index]
        assert pool.keys.shape == (17, shape.kv_heads, shape.key_dim)  # five blocks, the trash and the spare row
        assert pool.values.shape == (17, shape.kv_heads, shape.value_dim)
        assert pool.keys.dtype == pool.values.dtype == shape.dtype
        assert pool.keys.is_contiguous() and pool.values.is_contiguous()
        assert not pool.keys.any() and not pool.values.any()
    for i, pool in enumerate(cache.pools.values()):  # no two are one memory
        pool.keys.fill_(i + 1), pool.values.fill_(-i - 1)
    assert [pool.keys.unique().tolist() for pool in cache.pools.values()] == [[1.0], [2.0], [3.0]]
    assert [pool.values.unique().tolist() for pool in cache.pools.values()] == [[-1.0], [-2.0], [-3.0]]


def test_bytes_by_hand():
    cache, a, b = make(blocks=5, size=3), Owner(), Owner()
    token = 2 * (2 * (3 + 5) * 4) + 1 * (4 + 2) * 2
    assert cache.bytes_per_token == token == 140
    assert cache.nbytes_reserved == 15 * token
    assert cache.nbytes_reserved + 2 * token == sum(t.nbytes for p in cache.pools.values() for t in (p.keys, p.values))
    cache.allocate(a, 4), cache.allocate(b, 3)
    a.num_computed, b.num_computed = 4, 3
    assert (cache.blocks_used, cache.nbytes_held) == (3, 9 * token)
    assert (cache.tail_tokens([a, b]), cache.tokens_used([a, b])) == (2, 7)
    assert cache.report([a, b]) == {
        "blocks_used": 3, "blocks_free": 2, "blocks_cached": 0, "blocks_shared": 0, "kv_tail_tokens": 2,
        "kv_bytes_copied": 0, "prefix_evictions": 0,
    }  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 7, 16])
def test_a_table_has_the_blocks_that_its_tokens_need(size: int):
    cache, owner = make(blocks=6, size=size, layers={}), Owner()
    for tokens in range(1, 6 * size + 1):
        assert cache.allocate(owner, tokens)
        owner.num_computed, table = tokens, owner.table
        assert len(table.blocks) == cache.blocks_for(tokens) == (tokens + size - 1) // size
        assert table.capacity == len(table.blocks) * size and cache.tail_tokens([owner]) == table.capacity - tokens
        assert cache.tokens_used([owner]) == tokens
        rows = [table.row(p) for p in range(tokens)]
        assert rows == [table.blocks[p // size] * size + p % size for p in range(tokens)] == sorted(set(rows))
        cache.check_invariants([owner])
    assert not cache.allocate(owner, 6 * size + 1)


def test_rows_of_tables_that_lie_anywhere():
    assert [BlockTable(3, [5, 0, 2]).row(p) for p in range(8)] == [15, 16, 17, 0, 1, 2, 6, 7]


# -- block tables on the host and on a device -------------------------------------------------------------------------


def test_rows_of_the_tables_follow_growth_and_are_used_again():
    cache, (a, b, c) = make(blocks=8, max_num_seqs=2), (Owner(), Owner(), Owner())
    assert cache.tables.shape == (2, 8) and cache.tables.dtype == np.int32
    for tokens in (3, 4, 5, 13):
        assert cache.allocate(a, tokens) and cache.allocate(b, 1)
        for owner in (a, b):
            assert cache.tables[owner.table.index, : len(owner.table.blocks)].tolist() == owner.table.blocks
    assert {a.table.index, b.table.index} == {0, 1}
    row = a.table.index
    cache.free(a)
    assert cache.allocate(c, 9) and c.table.index == row and len(cache.tables) == 2
    assert cache.tables[row, :3].tolist() == c.table.blocks
    cache.check_invariants([b, c])


def test_more_requests_than_were_foreseen_get_a_larger_table():
    cache, owners = make(blocks=9, max_num_seqs=1), [Owner() for _ in range(5)]
    for count, owner in enumerate(owners, 1):
        assert cache.allocate(owner, 1)
        assert [cache.tables[o.table.index, 0] for o in owners[:count]] == [o.table.blocks[0] for o in owners[:count]]
        cache.check_invariants(owners[:count])
    assert cache.tables.shape == (8, 9) and cache.device_tables.shape == (8, 9)
    assert cache.allocate(owners[0], 2 * SIZE)  # one that was there before
    cache.check_invariants(owners)
    cache.reset()
    again = [Owner() for _ in range(8)]
    assert all(cache.allocate(owner, 1) for owner in again) and len(cache.tables) == 8
    cache.check_invariants(again)


@pytest.mark.parametrize(
    ("cache", "shape"),
    [
        (make(blocks=9, max_num_seqs=3, max_model_len=4 * SIZE), (3, 4)),
        (make(blocks=9, max_num_seqs=3, max_model_len=4 * SIZE + 1), (3, 5)),
        (make(blocks=2, max_num_seqs=3, max_model_len=99), (3, 2)),
        (SlotKVCache({}, 5, 99, CPU), (5, 1)),
    ],
)
def test_a_row_has_an_entry_for_each_block_that_a_request_may_have(cache: PagedKVCache, shape: tuple[int, int]):
    assert cache.tables.shape == shape


@pytest.mark.parametrize("cache", [make(max_num_seqs=2), SlotKVCache(LAYERS, 8, SIZE, CPU)])
def test_on_a_cpu_the_device_has_the_same_tables(cache: PagedKVCache | SlotKVCache):
    owners = [Owner() for _ in range(4)]
    assert all(cache.allocate(owner, SIZE) for owner in owners)
    assert cache.device_tables.dtype == torch.int32 and not cache.changes
    assert cache.device_tables.data_ptr() == cache.tables.__array_interface__["data"][0]
    assert [int(cache.device_tables[o.table.index, 0]) for o in owners] == [o.table.blocks[0] for o in owners]


@pytest.mark.parametrize("kind", ["slots", "paged"])
def test_for_another_device_exactly_what_changed_is_noted(kind: str):
    meta = torch.device("meta")
    cache = (
        SlotKVCache(LAYERS, 4, 2 * SIZE, meta) if kind == "slots"
        else PagedKVCache(LAYERS, 8, SIZE, meta, max_num_seqs=3)
    )  # fmt: skip
    assert cache.device_tables.is_meta and cache.pools[1].keys.is_meta and cache.changes == {}
    width, a, b = cache.tables.shape[1], Owner(), Owner()

    def noted() -> dict[int, int]:
        changes, cache.changes = cache.changes, {}
        return changes

    def entries(owner: Owner, begin: int = 0) -> dict[int, int]:
        return {owner.table.index * width + i: block for i, block in enumerate(owner.table.blocks) if i >= begin}

    assert cache.allocate(a, 5) and noted() == entries(a)
    assert cache.allocate(a, 8) and noted() == {}  # there was room
    assert cache.allocate(b, 3) and cache.allocate(b, SIZE + 1) and noted() == entries(b)  # of two times the sum
    if kind == "paged":
        assert cache.allocate(a, 9) and noted() == entries(a, 2)
    cache.free(a)
    assert noted() == {}  # the entries behind a request's blocks mean nothing
    assert cache.allocate(a, 1) and noted() == entries(a)
    assert not cache.allocate(Owner(), 99) and noted() == {}


def test_a_larger_table_goes_to_the_device_as_a_whole():
    class Far(PagedKVCache):
        """As if its tables were copied to another device; `mirror` is what stands there."""

        def _make_tables(self, tables: np.ndarray) -> None:
            super()._make_tables(tables)
            self.mirror = tables.copy().reshape(-1)

    cache, owners = Far({}, 12, 1, torch.device("meta"), max_num_seqs=1), [Owner() for _ in range(6)]
    for round_of_tokens in (1, 2):
        for owner in owners:
            assert cache.allocate(owner, round_of_tokens)
            if owner is not owners[1]:  # a step in between, or none
                for place, block in cache.changes.items():
                    cache.mirror[place] = block
                cache.changes.clear()
    mirror = cache.mirror.reshape(cache.tables.shape)
    assert [mirror[o.table.index, :2].tolist() for o in owners] == [o.table.blocks for o in owners]


# -- room -------------------------------------------------------------------------------------------------------------


def test_a_refusal_changes_nothing():
    cache = make(blocks=5)
    first = join(cache, list(range(9)))  # 3 blocks
    cache.free(join(cache, list(range(50, 54))))  # cached
    fork = cache.fork(first, 9)
    newcomer, child, anybody = Owner(list(range(50, 70))), Owner(), Owner()
    prefix = cache.find_prefix(newcomer)
    assert prefix.tokens == 4 and len(prefix.blocks) == 1
    owners = [first, newcomer, child, anybody]
    before = state(cache, owners)
    assert not cache.allocate(first, 21)  # 3 more, 2 are free
    assert not cache.allocate(first, 13, reserve=2)
    assert not cache.allocate(newcomer, 20, prefix=prefix)
    assert not cache.allocate(newcomer, 8, prefix=prefix, reserve=1)  # the one that was found is taken too
    assert not cache.allocate(child, 10, prefix=fork, reserve=2)  # so is a copy
    assert not cache.allocate(anybody, 1, reserve=2)
    assert state(cache, owners) == before
    assert cache.allocate(newcomer, 8, prefix=prefix)
    newcomer.num_computed = 4
    cache.check_invariants([first, newcomer])
    assert cache.allocator.num_free == 0 and newcomer.table.blocks[0] == prefix.blocks[0]


@pytest.mark.parametrize("reserve", [0, 1, 2, 3])
def test_reserved_blocks_stay_free(reserve: int):
    cache, a, b = make(blocks=4, layers={}), Owner(), Owner()
    assert cache.allocate(a, (4 - reserve) * SIZE, reserve=reserve) and cache.allocator.num_free == reserve
    assert not cache.allocate(b, 1, reserve=reserve)
    assert cache.allocate(a, (4 - reserve) * SIZE, reserve=reserve)  # what needs nothing is given


def test_what_comes_back_can_be_given_again():
    cache, a, b, nobody = make(blocks=4), Owner(), Owner(), Owner()
    assert cache.allocate(a, 9) and not cache.allocate(b, 9)
    cache.free(a), cache.free(a), cache.free(nobody)
    assert cache.blocks_used == 0 and a.table is None
    assert cache.allocate(b, 16)
    cache.check_invariants([b])


def test_nothing_of_a_request_stays_when_it_is_gone():
    """Whether it ran or was only looked up."""
    cache = make()
    ran, waited = join(cache, list(range(9))), Owner(list(range(9)))
    assert cache.find_prefix(waited).tokens == 8
    cache.free(ran), cache.free(waited)
    gone = weakref.ref(ran), weakref.ref(waited)
    del ran, waited
    assert [reference() for reference in gone] == [None, None]


def test_after_a_reset_everything_is_free_and_nothing_is_found():
    cache = make(blocks=4)
    cache.free(join(cache, [1] * 5)), join(cache, [2] * 7)
    cache.reset()
    assert cache.allocator.num_free == 4 and cache.allocator.num_cached == 0
    assert cache.find_prefix(Owner([1] * 5)) == cache.find_prefix(Owner([2] * 7)) == NO_PREFIX
    again = join(cache, [2] * 16)
    assert holds(cache, again, 16)
    cache.check_invariants([again])


def test_what_was_left_in_a_block_is_no_part_of_a_request():
    """Nothing is wiped: rows that a request has written are its own, and the rest is for nobody to read."""
    cache = make(blocks=6)
    poison(cache)
    one = join(cache, list(range(8)))
    two = join(cache, list(range(20, 26)))
    assert cache.allocate(one, 9) and holds(cache, one, 8) and holds(cache, two, 6)
    assert torch.isnan(cache.pools[0].keys).any()


# -- copy-on-write ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_shares_full_blocks_and_copies_the_one_that_it_writes_to(tokens: int, caching: bool):
    cache = make(blocks=9, enable_prefix_caching=caching)
    poison(cache)
    parent = join(cache, list(range(30, 42)), tokens)
    prefix = cache.fork(parent, tokens)
    assert prefix.forked and prefix.tokens == tokens and list(prefix.blocks) == parent.table.blocks
    assert len(prefix.keys) == (tokens // SIZE if caching else 0)
    child = Owner([*parent.ids[:tokens], 77, 78, 79, 80, 81])
    assert cache.allocate(child, tokens + 1, prefix=prefix)
    child.num_computed = tokens
    cache.check_invariants([parent, child])
    mine, its = child.table.blocks, parent.table.blocks
    full, rest = divmod(tokens, SIZE)
    assert mine[:full] == its[:full] and not set(mine[full:]) & set(its)
    assert cache.bytes_copied == rest * cache.bytes_per_token
    assert cache.allocator.num_shared == full
    assert holds(cache, child, tokens) and holds(cache, parent, tokens)

    write(cache, child, tokens, tokens + 1)
    assert cache.allocate(parent, tokens + 1)
    write(cache, parent, tokens, tokens + 1)
    assert cache.bytes_copied == rest * cache.bytes_per_token  # nobody shares it any more
    assert holds(cache, child, tokens + 1) and holds(cache, parent, tokens + 1)
    cache.free(parent)
    assert cache.blocks_used == len(mine) and cache.allocator.num_shared == 0
    assert holds(cache, child, tokens + 1)
    cache.free(child)
    assert cache.blocks_used == 0
    cache.check_invariants([])


def test_a_fork_of_a_parent_that_has_gone_on_copies_what_they_share_alone():
    cache = make(blocks=6, enable_prefix_caching=False)
    parent = join(cache, list(range(8)))
    child = Owner([*range(6), 90, 91])
    assert cache.allocate(child, 7, prefix=cache.fork(parent, 6))
    assert cache.bytes_copied == 2 * cache.bytes_per_token and holds(cache, child, 6)
    assert not cache.pools[0].keys[child.table.row(6)].any()  # the parent's token is not in it


def test_four_answers_to_one_prompt_by_hand():
    cache = make(blocks=8, enable_prefix_caching=False)
    parent = join(cache, list(range(10)))  # 2 full blocks, and one with 2 tokens
    children = [Owner([*range(10), 90 + i]) for i in range(3)]
    for child in children:
        assert cache.allocate(child, 11, prefix=cache.fork(parent, 10))
        compute(cache, child, 10, 11)
    everybody = [parent, *children]
    assert cache.blocks_used == 3 + 3 and cache.allocator.num_shared == 2
    assert cache.bytes_copied == 3 * 2 * cache.bytes_per_token
    assert cache.tokens_used(everybody) == 8 + 2 + 3 * 3 and cache.tail_tokens(everybody) == 2 + 3 * 1
    assert all(holds(cache, child, 11) for child in children) and holds(cache, parent, 10)
    more = Owner()
    assert not cache.allocate(more, 9) and cache.allocate(more, 8)


def test_a_copy_that_finds_no_block_is_refused():
    cache = make(blocks=3, enable_prefix_caching=False)
    parent, child = join(cache, list(range(9))), Owner()
    before = state(cache, [parent, child])
    assert not cache.allocate(child, 10, prefix=cache.fork(parent, 9))
    assert state(cache, [parent, child]) == before
    assert cache.allocate(parent, 10)  # its own block
    cache.free(parent)
    assert cache.blocks_used == 0


# -- prefix cache -----------------------------------------------------------------------------------------------------


def test_keys_are_chained_and_tell_tokens_apart():
    first = block_key(b"", [1, 2, 3])
    assert len(first) == hashlib.sha256().digest_size and block_key(b"", [1, 2, 3]) == first
    others = [
        block_key(b"", [1, 2, 4]), block_key(b"", [3, 2, 1]), block_key(b"", [1, 2]), block_key(b"", [1, 2, 3, 0]),
        block_key(first, [1, 2, 3]), block_key(b"", [1, 2 + 256, 3]), block_key(b"", [1 + 2**32, 2, 3]),
        block_key(block_key(b"", [9, 9, 9]), [1, 2, 3]),
    ]  # fmt: skip
    assert len({first, *others}) == 1 + len(others)


def test_a_prefix_is_found_while_its_owner_runs_and_after():
    cache = make()
    owner = join(cache, list(range(10)))
    blocks, newcomer = owner.table.blocks[:2], Owner([*range(9), 99, 98])
    for _ in range(2):
        prefix = cache.find_prefix(newcomer)
        assert (prefix.tokens, prefix.forked, len(prefix.keys), list(prefix.blocks)) == (8, False, 2, blocks)
        cache.free(owner)
    assert cache.allocator.num_cached == 2 and cache.allocate(newcomer, 11, prefix=prefix)
    assert cache.allocator.num_cached == 0 and cache.bytes_copied == 0
    write(cache, newcomer, 8, 11)
    assert holds(cache, newcomer, 11)


def test_a_newcomer_computes_at_least_one_token():
    cache = make()
    join(cache, list(range(12)))
    prefixes = [cache.find_prefix(Owner(list(range(n)))).tokens for n in range(1, 14)]
    assert prefixes == [0] * 4 + [4] * 4 + [8] * 4 + [12]


def test_equal_blocks_behind_different_beginnings_are_not_taken_for_each_other():
    """Keys and values depend on all that came before."""
    cache = make()
    join(cache, [1, 1, 1, 1, 7, 7, 7, 7, 5])
    assert cache.find_prefix(Owner([2, 2, 2, 2, 7, 7, 7, 7, 5])) == NO_PREFIX
    assert cache.find_prefix(Owner([7, 7, 7, 7, 5])) == NO_PREFIX  # the same tokens, at another position
    assert cache.find_prefix(Owner([1, 1, 1, 1, 8, 8, 8, 8, 5])).tokens == 4


def test_only_what_was_computed_can_be_found():
    cache = make()
    owner, asks = Owner(list(range(20))), Owner(list(range(20)))
    cache.allocate(owner, 14)
    assert cache.find_prefix(asks) == NO_PREFIX
    for computed, tokens in [(3, 0), (4, 4), (7, 4), (8, 8), (14, 12)]:
        owner.num_computed = computed
        cache.cache_blocks(owner)
        assert cache.find_prefix(asks).tokens == tokens
    cache.check_invariants([owner])
    broken = Owner(list(range(50, 70)))
    cache.allocate(broken, 16), cache.free(broken)  # its step failed
    assert cache.find_prefix(Owner(list(range(50, 70)))) == NO_PREFIX


def test_tokens_of_an_answer_are_found_too():
    cache = make()
    owner = join(cache, list(range(6)))
    for token in range(6, 13):
        owner.ids.append(token)
        assert cache.allocate(owner, len(owner.ids))
        compute(cache, owner, token, token + 1)
    cache.free(owner)
    again = Owner([*range(13), 99, 98])
    prefix = cache.find_prefix(again)
    assert prefix.tokens == 12 and cache.allocate(again, 13, prefix=prefix) and holds(cache, again, 12)


def test_a_request_that_waits_is_looked_up_in_every_step_and_hashed_once(monkeypatch: pytest.MonkeyPatch):
    cache, calls = make(), []
    join(cache, list(range(13)))
    monkeypatch.setattr("minfer_lib.cache.paged.block_key", lambda *args: calls.append(args) or block_key(*args))
    asks = Owner(list(range(13)))
    assert [cache.find_prefix(asks).tokens for _ in range(5)] == [12] * 5 and len(calls) == 3


def test_two_who_compute_the_same_at_the_same_time():
    cache = make()
    one, two = Owner(list(range(9))), Owner(list(range(9)))
    for owner in (one, two):
        cache.allocate(owner, 9)
        write(cache, owner, 0, 9)
    for owner in (two, one):
        owner.num_computed = 9
        cache.cache_blocks(owner)
    assert list(cache.find_prefix(Owner(list(range(9)))).blocks) == two.table.blocks[:2]
    cache.free(one)
    assert cache.allocator.num_cached == 0  # its blocks were never found
    child = Owner([*range(9), 5, 5, 5, 5])
    assert cache.allocate(child, 13, prefix=cache.find_prefix(child))
    compute(cache, child, 8, 13)
    cache.free(two), cache.free(child)
    assert cache.allocator.num_cached == 3 and cache.find_prefix(Owner([*child.ids, 0])).tokens == 12
    cache.check_invariants([])


def test_without_prefix_caching_nothing_is_found_or_kept():
    cache = make(enable_prefix_caching=False)
    owner = join(cache, list(range(10)))
    assert cache.find_prefix(Owner(list(range(10)))) == NO_PREFIX
    cache.free(owner)
    assert cache.allocator.num_cached == 0


def test_what_is_forgotten_of_a_request_is_found_by_nobody():
    cache = make()
    join(cache, list(range(4)))
    owner = join(cache, list(range(12)))
    cache.forget_blocks(owner)
    assert cache.find_prefix(Owner(list(range(12)))) == NO_PREFIX
    cache.free(owner)
    assert cache.allocator.num_cached == 0


def test_of_a_text_the_end_is_evicted_first_and_of_texts_the_one_unused_for_longest():
    cache = make(blocks=6)
    texts = {name: [ord(name)] * 9 for name in "abc"}

    def tokens(name: str) -> int:
        return cache.find_prefix(Owner(texts[name])).tokens

    for name in "ab":
        cache.free(join(cache, texts[name]))
    blocks = {name: cache.find_prefix(Owner(texts[name])).blocks for name in "ab"}
    assert cache.allocator.cached == (*blocks["a"][::-1], *blocks["b"][::-1])
    cache.free(join(cache, texts["a"]))  # used again
    assert cache.allocator.cached == (*blocks["b"][::-1], *blocks["a"][::-1])
    taken = Owner([0] * 12)
    cache.allocate(taken, 12)  # two were empty: the third costs b its end
    assert cache.allocator.evictions == 1 and (tokens("b"), tokens("a")) == (4, 8)
    cache.allocate(taken, 17)
    assert (tokens("b"), tokens("a")) == (0, 4)
    assert cache.allocator.evictions == 3 == cache.report([taken])["prefix_evictions"]
    cache.check_invariants([taken])


def test_a_block_that_is_found_is_not_evicted_to_make_room_for_who_found_it():
    cache = make(blocks=4)
    cache.free(join(cache, [1] * 9))
    cache.free(join(cache, [2] * 4))
    newcomer = Owner([1] * 16)
    prefix = cache.find_prefix(newcomer)
    assert prefix.tokens == 8 and cache.allocate(newcomer, 16, prefix=prefix)  # all of the pool
    assert newcomer.table.blocks[:2] == list(prefix.blocks) and len(set(newcomer.table.blocks)) == 4
    assert holds(cache, newcomer, 8) and cache.find_prefix(Owner([2] * 9)) == NO_PREFIX
    newcomer.num_computed = 8
    cache.check_invariants([newcomer])


# -- when cached contents are given up --------------------------------------------------------------------------------


def test_running_requests_keep_their_blocks_and_others_find_nothing_of_them():
    cache = make()
    running, gone = join(cache, list(range(6))), join(cache, [9] * 5)
    cache.free(gone)
    cache.reset_prefix_cache()
    assert cache.allocator.num_cached == 0 and cache.find_prefix(Owner([9] * 5)) == NO_PREFIX
    running.ids += range(6, 12)
    assert cache.allocate(running, 12)
    compute(cache, running, 6, 12)
    assert holds(cache, running, 12) and cache.find_prefix(Owner(list(range(13)))) == NO_PREFIX
    cache.free(running)
    assert cache.allocator.num_cached == 0
    newcomer = join(cache, list(range(9)))
    assert cache.find_prefix(Owner(list(range(9)))).tokens == 8
    cache.check_invariants([newcomer])


def test_what_a_fork_of_an_older_request_computes_is_found_by_nobody():
    cache = make(blocks=12)
    parent = join(cache, list(range(8)))
    cache.reset_prefix_cache()  # the weights have changed: the parent's keys are old
    child = Owner([*range(8), 50, 51, 52, 53])
    assert cache.allocate(child, 12, prefix=cache.fork(parent, 8))
    compute(cache, child, 8, 12)  # over old keys
    join(cache, list(range(9)))  # new keys of the same prompt
    assert cache.find_prefix(Owner([*child.ids, 0])).tokens == 8


def test_what_a_fork_computes_is_found_by_others():
    cache = make(blocks=12)
    cache.reset_prefix_cache()  # contents were given up before, and not since
    parent = join(cache, list(range(8)))
    child = Owner([*range(8), 50, 51, 52, 53])
    assert cache.allocate(child, 12, prefix=cache.fork(parent, 8))
    compute(cache, child, 8, 12)
    assert cache.find_prefix(Owner([*child.ids, 0])).tokens == 12


def test_each_time_that_contents_are_given_up_counts():
    """A request that began between two changes of the weights has keys of neither the old ones nor the new."""
    cache = make(blocks=12)
    cache.reset_prefix_cache()
    between = join(cache, list(range(8)), tokens=2)
    cache.reset_prefix_cache()
    assert cache.allocate(between, 8)
    compute(cache, between, 2, 8)
    assert cache.find_prefix(Owner(list(range(9)))) == NO_PREFIX


def test_tables_are_as_wide_as_the_longest_request_needs():
    assert make(blocks=8, max_model_len=9).tables.shape[1] == 3  # blocks of 4 tokens
    assert make(blocks=2, max_model_len=9).tables.shape[1] == 2  # there are no more
    assert make(blocks=8).tables.shape[1] == 8


# -- what `check_invariants` finds ------------------------------------------------------------------------------------


def busy() -> tuple[PagedKVCache, list[Owner]]:
    cache = make(blocks=8)
    owners = [join(cache, list(range(10))), join(cache, [*range(8), 50])]
    assert cache.allocator.num_shared == 2
    return cache, owners


Break = Callable[[PagedKVCache, BlockTable, list[Owner]], object]
BREAKS: dict[str, Break] = {
    "a block too few": lambda c, t, o: c.allocator.free(t.blocks.pop()),
    "a block too many": lambda c, t, o: t.blocks.append(c.allocator.allocate()),
    "a block twice": lambda c, t, o: (t.blocks.__setitem__(1, t.blocks[0]), c.allocator.share(t.blocks[0])),
    "a block that was not allocated": lambda c, t, o: t.blocks.__setitem__(-1, 7),
    "a reference that nobody holds": lambda c, t, o: c.allocator.share(t.blocks[-1]),
    "more keys than full blocks": lambda c, t, o: t.keys.append(b"x"),
    "more computed than there is room for": lambda c, t, o: setattr(o[0], "num_computed", 13),
    "room for more than its blocks": lambda c, t, o: setattr(t, "capacity", 16),
    "another row of the tables": lambda c, t, o: setattr(t, "index", 9),
    "a row that another has too": lambda c, t, o: setattr(t, "index", o[1].table.index),
    "a row that says otherwise": lambda c, t, o: c.tables.__setitem__((t.index, 2), 0),
    "a table of somebody who does not run": lambda c, t, o: o.pop(),
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_state_is_found(how: str):
    cache, owners = busy()
    cache.check_invariants(owners)
    BREAKS[how](cache, owners[0].table, owners)
    with pytest.raises(InvariantBroken):
        cache.check_invariants(owners)
