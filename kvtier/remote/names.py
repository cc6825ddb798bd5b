"""What pages are called in a store that hosts share."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from kvtier.config import KVCacheManagerConfig
from kvtier.keys import encode_key, layout_fingerprint
from kvtier.layout import group_layouts
from kvtier.plan import cold_page_bytes

__all__ = ["ObjectNames"]


class ObjectNames:
    """Names of pages: what their bytes mean, the pool group, and the key of the block.

    Parameters
    ----------
    config : KVCacheManagerConfig
        What a page is made of; its ``remote.namespace`` stands for the model and the number format.

    Notes
    -----
    Two caches share pages exactly if their layers, tokens of a block, codec and namespace are the
    same. Quotas and tiers may differ.
    """

    def __init__(self, config: KVCacheManagerConfig) -> None:
        codec = config.cold_page_codec
        how = "" if codec is None else f"{type(codec).__module__}.{type(codec).__qualname__}"
        sizes = cold_page_bytes(codec, group_layouts(config.layers))
        space = "" if config.remote is None else config.remote.namespace
        digest = blake2b(layout_fingerprint(config), digest_size=16, person=b"kvtier.remote.1")
        for part in (how, ",".join(map(str, sizes)), space):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        self._prefix = f"kvtier-{digest.hexdigest()}"

    def name(self, key: object, group: int) -> str:
        """Give the name of a page.

        Raises
        ------
        TypeError, ValueError
            A key that cannot be stored, as `encode_key` says.
        """
        return f"{self._prefix}-{group}-{encode_key(key).hex()}"

    def leading(self, keys: Iterable[object], group: int) -> list[str]:
        """Give the names of pages, up to the first key that cannot be stored."""
        names = []
        for key in keys:
            try:
                names.append(self.name(key, group))
            except (TypeError, ValueError):
                break
        return names
