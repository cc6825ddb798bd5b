"""Layout: groups, pools, and the places of buffers in a slot."""

from __future__ import annotations

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
