"""A store that hosts share, Mooncake Store, below the levels of a storage.

Its slots are not ours, and what it holds may go at any moment: so it is no `Level` with a quota and
an eviction policy, but a place beside the block cache that blocks are sent to and fetched from.
"""
