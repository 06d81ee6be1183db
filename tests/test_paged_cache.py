"""The paged cache, row by row: what a table leads to, who shares it, what is copied, wiped, found again and evicted."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from minfer_lib.cache.paged import BlockTable, PagedKVCache, block_key
from minfer_lib.cache.pool import NO_PREFIX, LayerShape
from minfer_lib.errors import InvalidParameter, InvariantBroken

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
    prefix = cache.match(owner)
    tokens = len(ids) if tokens is None else tokens
    assert cache.allocate(owner, tokens, prefix=prefix, reserve=reserve)
    write(cache, owner, prefix.tokens, tokens)
    cache.commit(owner, tokens)
    cache.check_invariants()
    return owner


def write(cache: PagedKVCache, owner: Owner, begin: int, end: int, value: float | None = None) -> None:
    """Fills rows with what depends on layer, on the token and on whether it is a key, as a model would."""
    rows = torch.tensor([cache.tables[owner].row(p) for p in range(begin, end)])
    for layer, pool in cache.pools.items():
        for sign, store in ((1, pool.keys), (-1, pool.values)):
            marks = [sign * (100 * layer + owner.ids[p] + 1) if value is None else value for p in range(begin, end)]
            new = torch.tensor(marks, dtype=store.dtype)[:, None, None].expand(-1, *store.shape[1:])
            store.index_copy_(0, rows, new.contiguous())


def holds(cache: PagedKVCache, owner: Owner, tokens: int) -> bool:
    """Whether the first so many tokens lie where the table says, in all layers, keys and values."""
    for layer, pool in cache.pools.items():
        for sign, store in ((1, pool.keys), (-1, pool.values)):
            for position in range(tokens):
                mark = torch.tensor(sign * (100 * layer + owner.ids[position] + 1), dtype=store.dtype)
                if not (store[cache.tables[owner].row(position)] == mark).all():
                    return False
    return True


def tail_is_zero(cache: PagedKVCache, owner: Owner) -> bool:
    table = cache.tables[owner]
    end = (table.blocks[-1] + 1) * cache.block_size
    return all(
        not store[end - table.unfilled : end].any() for p in cache.pools.values() for store in (p.keys, p.values)
    )


def poison(cache: PagedKVCache) -> None:
    """What anybody may have left in any block."""
    for pool in cache.pools.values():
        pool.keys.fill_(torch.nan), pool.values.fill_(torch.inf)


def state(cache: PagedKVCache) -> tuple:
    tables = {o: (list(t.blocks), t.tokens, list(t.keys)) for o, t in cache.tables.items()}
    stores = tuple(t.clone() for pool in cache.pools.values() for t in (pool.keys, pool.values))
    references = [cache.allocator.references(b) for b in range(cache.num_blocks)]
    return tables, cache.allocator.cached, references, cache.report(), [s.tolist() for s in stores]


# -- layout -----------------------------------------------------------------------------------------------------------


def test_pools_of_layers_of_different_shapes():
    cache = make(blocks=5, size=3)
    assert cache.pools.keys() == LAYERS.keys()
    for index, shape in LAYERS.items():
        pool = cache.pools[index]
        assert pool.keys.shape == (15, shape.kv_heads, shape.key_dim)
        assert pool.values.shape == (15, shape.kv_heads, shape.value_dim)
        assert pool.keys.dtype == pool.values.dtype == shape.dtype
        assert pool.keys.is_contiguous() and pool.values.is_contiguous()
        assert not pool.keys.any() and not pool.values.any()
    for i, pool in enumerate(cache.pools.values()):  # no two are one memory
        pool.keys.fill_(i + 1), pool.values.fill_(-i - 1)
    assert [pool.keys.unique().tolist() for pool in cache.pools.values()] == [[1.0], [2.0], [3.0]]
    assert [pool.values.unique().tolist() for pool in cache.pools.values()] == [[-1.0], [-2.0], [-3.0]]


def test_bytes_by_hand():
    cache = make(blocks=5, size=3)
    token = 2 * (2 * (3 + 5) * 4) + 1 * (4 + 2) * 2
    assert cache.bytes_per_token == token == 140
    assert cache.nbytes_reserved == 15 * token
    assert cache.nbytes_reserved == sum(t.nbytes for p in cache.pools.values() for t in (p.keys, p.values))
    cache.allocate("a", 4), cache.allocate("b", 3)
    assert (cache.blocks_used, cache.nbytes_held, cache.nbytes_used) == (3, 9 * token, 7 * token)
    assert (cache.tail_tokens, cache.tokens_used) == (2, 7)
    assert cache.report() == {
        "blocks_used": 3, "blocks_free": 2, "blocks_cached": 0, "blocks_shared": 0, "kv_tail_tokens": 2,
        "kv_bytes_copied": 0, "prefix_evictions": 0,
    }  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 7, 16])
def test_a_table_has_the_blocks_that_its_tokens_need(size: int):
    cache = make(blocks=6, size=size, layers={})
    for tokens in range(1, 6 * size + 1):
        assert cache.allocate("a", tokens, tokens - 1)
        table = cache.tables["a"]
        assert len(table.blocks) == cache.blocks_for(tokens) == (tokens + size - 1) // size
        assert table.unfilled == cache.tail_tokens == len(table.blocks) * size - tokens < size
        assert cache.tokens_used == tokens
        rows = [table.row(p) for p in range(tokens)]
        assert rows == [table.blocks[p // size] * size + p % size for p in range(tokens)] == sorted(set(rows))
        assert cache.block_table("a") is table.blocks
        cache.check_invariants({"a": tokens - 1})
    assert not cache.allocate("a", 6 * size + 1, 6 * size)


def test_rows_of_tables_that_lie_anywhere():
    table = BlockTable(3, [5, 0, 2], 8)
    assert [table.row(p) for p in range(8)] == [15, 16, 17, 0, 1, 2, 6, 7] and table.unfilled == 1


@pytest.mark.parametrize("size", [0, -1, 1.0, True, "16", None])
def test_block_sizes_that_are_not_possible(size: object):
    with pytest.raises(InvalidParameter, match="block_size"):
        PagedKVCache({}, 4, size, CPU)


# -- room -------------------------------------------------------------------------------------------------------------


def test_a_refusal_changes_nothing():
    cache = make(blocks=5)
    first = join(cache, list(range(9)))  # 3 blocks
    other = join(cache, list(range(50, 54)))
    cache.free(other)  # cached
    fork = cache.fork(first, 9)
    newcomer = Owner(list(range(50, 70)))
    found = cache.match(newcomer)
    assert found.tokens == 4 and len(found.blocks) == 1
    before = state(cache)
    assert not cache.allocate(first, 21, 9)  # 3 more, 2 are free
    assert not cache.allocate(first, 10, 9, reserve=3)
    assert not cache.allocate(newcomer, 20, prefix=found)
    assert not cache.allocate(newcomer, 8, prefix=found, reserve=1)  # the one found counts as one that is taken
    assert not cache.allocate("child", 10, prefix=fork, reserve=2)  # so does a copy
    assert not cache.allocate("anybody", 1, reserve=2)
    assert state(cache) == before
    assert cache.allocate(newcomer, 8, prefix=found)
    cache.check_invariants()
    assert cache.allocator.num_free == 0 and cache.block_table(newcomer)[0] == found.blocks[0]


@pytest.mark.parametrize("reserve", [0, 1, 2, 3])
def test_reserved_blocks_stay_free(reserve: int):
    cache = make(blocks=4, layers={})
    assert cache.allocate("a", (4 - reserve) * SIZE, reserve=reserve) and cache.allocator.num_free == reserve
    assert not cache.allocate("b", 1, reserve=reserve)
    assert cache.allocate("a", (4 - reserve) * SIZE, 1, reserve=reserve)  # what needs nothing is given


def test_what_comes_back_can_be_given_again():
    cache = make(blocks=4)
    assert cache.allocate("a", 9) and not cache.allocate("b", 9)
    cache.free("a"), cache.free("a"), cache.free("nobody")
    assert cache.blocks_used == 0 and cache.tables == {}
    assert cache.allocate("b", 16)
    cache.check_invariants({"b": 0})


def test_a_step_that_was_broken_off_gives_back_what_the_next_does_not_need():
    cache = make(blocks=6)
    owner = Owner(list(range(30)))
    cache.allocate(owner, 2)
    write(cache, owner, 0, 2)
    assert cache.allocate(owner, 18, 2) and cache.blocks_used == 5
    write(cache, owner, 2, 18, torch.nan)  # it had got that far
    assert cache.allocate(owner, 7, 2)
    assert cache.blocks_used == 2 and cache.tables[owner].tokens == 7 and tail_is_zero(cache, owner)
    write(cache, owner, 2, 7)
    assert holds(cache, owner, 7)
    cache.check_invariants({owner: 7})


# -- wiping -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", range(1, 10))
def test_rows_behind_a_requests_tokens_are_zeros_whatever_was_left_there(tokens: int):
    cache = make(blocks=5)
    poison(cache)
    owner = Owner(list(range(20)))
    assert cache.allocate(owner, tokens) and tail_is_zero(cache, owner)
    write(cache, owner, 0, tokens)
    for end in range(tokens + 1, 14):
        assert cache.allocate(owner, end, end - 1) and tail_is_zero(cache, owner)
        write(cache, owner, end - 1, end)
    assert holds(cache, owner, 13)
    assert torch.isnan(cache.pools[0].keys).any()  # blocks that nobody asked for are left alone


def test_what_is_wiped_is_nobody_elses():
    cache = make(blocks=6)
    one, two = join(cache, list(range(8))), join(cache, list(range(20, 26)))
    cache.allocate(Owner(), 1)
    cache.allocate(one, 9, 8)
    assert holds(cache, one, 8) and holds(cache, two, 6)


# -- copy-on-write ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_shares_full_blocks_and_copies_the_one_that_it_writes_to(tokens: int, caching: bool):
    cache = make(blocks=9, enable_prefix_caching=caching)
    poison(cache)
    parent = join(cache, list(range(30, 42)), tokens)
    prefix = cache.fork(parent, tokens)
    assert prefix.forked and prefix.tokens == tokens and list(prefix.blocks) == cache.block_table(parent)
    assert len(prefix.keys) == (tokens // SIZE if caching else 0)
    child = Owner([*parent.ids[:tokens], 77, 78, 79, 80, 81])
    assert cache.allocate(child, tokens + 1, prefix=prefix)
    cache.check_invariants()
    mine, its = cache.block_table(child), cache.block_table(parent)
    full, rest = divmod(tokens, SIZE)
    assert mine[:full] == its[:full] and not set(mine[full:]) & set(its)
    assert cache.bytes_copied == rest * cache.bytes_per_token
    assert cache.allocator.num_shared == full
    assert holds(cache, child, tokens) and holds(cache, parent, tokens) and tail_is_zero(cache, child)

    write(cache, child, tokens, tokens + 1)
    assert cache.allocate(parent, tokens + 1, tokens)
    write(cache, parent, tokens, tokens + 1)
    assert cache.bytes_copied == rest * cache.bytes_per_token  # nobody shares it any more
    assert holds(cache, child, tokens + 1) and holds(cache, parent, tokens + 1)
    cache.free(parent)
    assert cache.blocks_used == len(mine) and cache.allocator.num_shared == 0
    assert holds(cache, child, tokens + 1)
    cache.free(child)
    assert cache.blocks_used == 0
    cache.check_invariants({})


def test_a_parent_that_writes_first_copies_too():
    """Two hold an unfilled block, as when a child has been given a table and nothing to write yet."""
    cache = make(blocks=6, enable_prefix_caching=False)
    parent = join(cache, list(range(6)))
    last = cache.block_table(parent)[-1]
    cache.allocator.share(last)  # somebody who only reads
    assert cache.allocate(parent, 7, 6)
    assert cache.block_table(parent)[-1] != last and cache.allocator.references(last) == 1
    assert cache.bytes_copied == 2 * cache.bytes_per_token
    assert holds(cache, parent, 6) and tail_is_zero(cache, parent)


def test_four_answers_to_one_prompt_by_hand():
    cache = make(blocks=8, enable_prefix_caching=False)
    parent = join(cache, list(range(10)))  # 2 full blocks, and one with 2 tokens
    children = [Owner([*range(10), 90 + i]) for i in range(3)]
    for child in children:
        assert cache.allocate(child, 11, prefix=cache.fork(parent, 10))
        write(cache, child, 10, 11)
    assert cache.blocks_used == 3 + 3 and cache.allocator.num_shared == 2
    assert cache.bytes_copied == 3 * 2 * cache.bytes_per_token
    assert cache.tokens_used == 8 + 2 + 3 * 3 and cache.tail_tokens == 2 + 3 * 1
    assert all(holds(cache, child, 11) for child in children) and holds(cache, parent, 10)
    assert not cache.allocate("more", 9) and cache.allocate("more", 8)


def test_a_copy_that_finds_no_block_is_refused():
    cache = make(blocks=3, enable_prefix_caching=False)
    parent = join(cache, list(range(9)))
    before = state(cache)
    assert not cache.allocate("child", 10, prefix=cache.fork(parent, 9))
    assert state(cache) == before
    assert cache.allocate(parent, 10, 9)  # its own block
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
    newcomer = Owner([*range(9), 99, 98])
    for _ in range(2):
        prefix = cache.match(newcomer)
        assert (prefix.tokens, prefix.forked, len(prefix.keys)) == (8, False, 2)
        assert cache.tables.get(owner) is None or list(prefix.blocks) == cache.block_table(owner)[:2]
        cache.free(owner)
    assert cache.allocator.num_cached == 2 and cache.allocate(newcomer, 11, prefix=prefix)
    assert cache.allocator.num_cached == 0 and cache.bytes_copied == 0
    write(cache, newcomer, 8, 11)
    assert holds(cache, newcomer, 11)


def test_a_newcomer_computes_at_least_one_token():
    cache = make()
    join(cache, list(range(12)))
    assert [cache.match(Owner(list(range(n)))).tokens for n in range(1, 14)] == [0] * 4 + [4] * 4 + [8] * 4 + [12]


def test_equal_blocks_behind_different_beginnings_are_not_taken_for_each_other():
    """Keys and values depend on all that came before."""
    cache = make()
    join(cache, [1, 1, 1, 1, 7, 7, 7, 7, 5])
    assert cache.match(Owner([2, 2, 2, 2, 7, 7, 7, 7, 5])) == NO_PREFIX
    assert cache.match(Owner([7, 7, 7, 7, 5])) == NO_PREFIX  # the same tokens, at another position
    assert cache.match(Owner([1, 1, 1, 1, 8, 8, 8, 8, 5])).tokens == 4


def test_only_what_was_computed_can_be_found():
    cache = make()
    owner, asks = Owner(list(range(20))), Owner(list(range(20)))
    cache.allocate(owner, 14)
    assert cache.match(asks) == NO_PREFIX
    for computed, found in [(3, 0), (4, 4), (7, 4), (8, 8), (14, 12)]:
        cache.commit(owner, computed)
        assert cache.match(asks).tokens == found
    cache.check_invariants({owner: 14})
    broken = Owner(list(range(50, 70)))
    cache.allocate(broken, 16), cache.free(broken)  # its step failed
    assert cache.match(Owner(list(range(50, 70)))) == NO_PREFIX


def test_tokens_of_an_answer_are_found_too():
    cache = make()
    owner = join(cache, list(range(6)))
    for token in range(6, 13):
        owner.ids.append(token)
        assert cache.allocate(owner, len(owner.ids), len(owner.ids) - 1)
        write(cache, owner, token, token + 1)
        cache.commit(owner, len(owner.ids))
    cache.free(owner)
    again = Owner([*range(13), 99, 98])
    prefix = cache.match(again)
    assert prefix.tokens == 12 and cache.allocate(again, 13, prefix=prefix) and holds(cache, again, 12)


def test_two_who_compute_the_same_at_the_same_time():
    cache = make()
    one, two = Owner(list(range(9))), Owner(list(range(9)))
    for owner in (one, two):
        cache.allocate(owner, 9)
        write(cache, owner, 0, 9)
    for owner in (two, one):
        cache.commit(owner, 9)
    assert list(cache.match(Owner(list(range(9)))).blocks) == cache.block_table(two)[:2]
    cache.free(one)
    assert cache.allocator.num_cached == 0  # its blocks were never found
    child = Owner([*range(9), 5, 5, 5, 5])
    assert cache.allocate(child, 13, prefix=cache.match(child))
    write(cache, child, 8, 13)
    cache.commit(child, 13)
    cache.free(two), cache.free(child)
    assert cache.allocator.num_cached == 3 and cache.match(Owner([*child.ids, 0])).tokens == 12
    cache.check_invariants({})


def test_without_prefix_caching_nothing_is_found_or_kept():
    cache = make(enable_prefix_caching=False)
    owner = join(cache, list(range(10)))
    assert cache.match(Owner(list(range(10)))) == NO_PREFIX
    cache.free(owner)
    assert cache.allocator.num_cached == 0


def test_of_a_text_the_end_is_evicted_first_and_of_texts_the_one_unused_for_longest():
    cache = make(blocks=6)
    texts = {name: [ord(name)] * 9 for name in "abc"}
    for name in "ab":
        cache.free(join(cache, texts[name]))
    blocks = {name: cache.match(Owner(texts[name])).blocks for name in "ab"}
    assert cache.allocator.cached == (*blocks["a"][::-1], *blocks["b"][::-1])
    cache.free(join(cache, texts["a"]))  # used again
    assert cache.allocator.cached == (*blocks["b"][::-1], *blocks["a"][::-1])
    taken = Owner([0] * 12)
    cache.allocate(taken, 12)  # two were empty: the third costs b its end
    assert cache.allocator.evictions == 1
    assert cache.match(Owner(texts["b"])).tokens == 4 and cache.match(Owner(texts["a"])).tokens == 8
    cache.allocate(taken, 17, 12)
    assert cache.match(Owner(texts["b"])).tokens == 0 and cache.match(Owner(texts["a"])).tokens == 4
    assert cache.allocator.evictions == 3 == cache.report()["prefix_evictions"]
    cache.check_invariants()


def test_a_block_that_is_found_is_not_evicted_to_make_room_for_who_found_it():
    cache = make(blocks=4)
    cache.free(join(cache, [1] * 9))
    cache.free(join(cache, [2] * 4))
    newcomer = Owner([1] * 16)
    prefix = cache.match(newcomer)
    assert prefix.tokens == 8 and cache.allocate(newcomer, 16, prefix=prefix)  # all of the pool
    assert cache.block_table(newcomer)[:2] == list(prefix.blocks) and len(set(cache.block_table(newcomer))) == 4
    assert holds(cache, newcomer, 8) and cache.match(Owner([2] * 9)) == NO_PREFIX
    cache.check_invariants()


# -- what `check_invariants` finds ------------------------------------------------------------------------------------


def busy() -> tuple[PagedKVCache, dict[Owner, int]]:
    cache = make(blocks=8)
    one, two = join(cache, list(range(10))), join(cache, [*range(8), 50])
    assert cache.allocator.num_shared == 2
    return cache, {one: 10, two: 9}


Table = Callable[[PagedKVCache, BlockTable, dict], object]
BREAKS: dict[str, Table] = {
    "a block too few": lambda c, t, n: c.allocator.free(t.blocks.pop()),
    "a block too many": lambda c, t, n: t.blocks.append(c.allocator.allocate()),
    "a block twice": lambda c, t, n: (t.blocks.__setitem__(1, t.blocks[0]), c.allocator.share(t.blocks[0])),
    "a block that was not allocated": lambda c, t, n: t.blocks.__setitem__(-1, 7),
    "a reference that nobody holds": lambda c, t, n: c.allocator.share(t.blocks[-1]),
    "more keys than full blocks": lambda c, t, n: t.keys.append(b"x"),
    "more computed than there is room for": lambda c, t, n: n.update({next(iter(n)): 11}),
    "runs without a table": lambda c, t, n: n.update({Owner(): 0}),
    "a table of somebody who does not run": lambda c, t, n: n.popitem(),
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_state_is_found(how: str):
    cache, computed = busy()
    cache.check_invariants(computed)
    BREAKS[how](cache, cache.tables[next(iter(computed))], computed)
    with pytest.raises(InvariantBroken):
        cache.check_invariants(computed)
