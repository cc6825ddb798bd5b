"""Layout: groups, pools, and the places of buffers in a slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import AttentionLayerConfig, BufferConfig
from kvtier.layout import BufferPlace, PoolLayout, group_layouts


def layer(
    layer_id: int, window: int | None = None, sinks: int | None = None, **sizes: int
) -> AttentionLayerConfig:
    buffers = [BufferConfig(role, size) for role, size in sizes.items()]
    return AttentionLayerConfig(layer_id, buffers, window, sinks)


def test_layers_with_one_window_form_one_group_in_order_of_first_appearance() -> None:
    layers = [
        layer(0, 128, key=8),
        layer(1, key=8),
        layer(2, 128, key=8),
        layer(3, 128, 4, key=8),
        layer(4, key=8),
    ]
    groups = group_layouts(layers)
    assert [group.layer_ids for group in groups] == [(0, 2), (1, 4), (3,)]
    windows = [(group.sliding_window_size, group.num_sink_tokens) for group in groups]
    assert windows == [(128, None), (None, None), (128, 4)]


def test_equal_buffers_of_all_layers_of_a_group_share_a_pool() -> None:
    (group,) = group_layouts([layer(7, key=64, value=64), layer(3, key=64, value=64)])
    places = (
        BufferPlace(7, "key", 0, 64),
        BufferPlace(7, "value", 64, 64),
        BufferPlace(3, "key", 128, 64),
        BufferPlace(3, "value", 192, 64),
    )
    assert group.pools == (PoolLayout(4 * 64, places),)


def test_buffers_of_other_sizes_have_pools_of_their_own_in_order_of_appearance() -> None:
    (group,) = group_layouts([layer(0, key=96, scale=2, value=96), layer(1, scale=2, key=32)])
    assert [pool.slot_size for pool in group.pools] == [2 * 96, 2 * 2, 32]
    assert [place.layer_id for place in group.pools[1].buffers] == [0, 1]


def test_a_cold_page_is_the_hot_slots_one_after_another() -> None:
    (group,) = group_layouts([layer(0, key=96, scale=2, value=96), layer(1, scale=2, key=32)])
    assert group.page_bytes == 192 + 4 + 32
    assert group.pool_offsets == (0, 192, 196)


def test_the_same_size_in_two_groups_makes_two_pools() -> None:
    groups = group_layouts([layer(0, key=64), layer(1, 16, key=64)])
    assert [[pool.slot_size for pool in group.pools] for group in groups] == [[64], [64]]


def test_no_layers_make_no_groups() -> None:
    assert group_layouts([]) == ()


# ------------------------------------------------------------------------------- stale blocks


def test_all_attention_sees_every_block() -> None:
    (group,) = group_layouts([layer(0, key=64)])
    assert group.stale_blocks(10**6, 16) == (0, 0)


def test_a_window_leaves_blocks_behind_that_it_has_left_whole() -> None:
    # Of 4 tokens a block, a window of 6. The token at 9 sees from 4 on, so block 0 is left.
    (group,) = group_layouts([layer(0, 6, key=64)])
    assert [group.stale_blocks(tokens, 4) for tokens in (0, 8, 9, 12, 13)] == [
        (0, 0),
        (0, 0),
        (0, 1),
        (0, 1),
        (0, 2),
    ]


def test_blocks_with_sinks_stay() -> None:
    (group,) = group_layouts([layer(0, 6, 5, key=64)])
    assert group.stale_blocks(9, 4) == (2, 2)
    assert group.stale_blocks(21, 4) == (2, 4)


@given(
    st.integers(0, 80),
    st.integers(1, 9),
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(0, 20)),
)
def test_a_block_is_stale_if_the_token_sees_none_of_its_tokens(
    tokens: int, per_block: int, window: int, sinks: int | None
) -> None:
    (group,) = group_layouts([layer(0, window, sinks, key=64)])
    first, end = group.stale_blocks(tokens, per_block)
    seen = {*range(max(0, tokens + 1 - window), tokens + 1), *range(sinks or 0)}
    unseen = {
        block
        for block in range(tokens // per_block + 1)
        if not seen.intersection(range(block * per_block, (block + 1) * per_block))
    }
    assert set(range(first, end)) == unseen
