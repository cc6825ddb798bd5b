"""What a remote store has to offer, and Mooncake Store as one: the only place that knows it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Protocol, TypeAlias

from kvtier.config import RemoteCacheTierConfig

__all__ = [
    "STRAY",
    "Connect",
    "MooncakeClient",
    "Refused",
    "StoreClient",
    "check_installed",
    "reason_of",
]

STRAY = -10_000
"""The code of an object whose read was given up, though it may still be written to its buffers."""

_REASONS = {
    STRAY: "stray",
    -200: "full",  # no segment has room, or none is mounted
    -600: "refused",  # of another size, or not a range that it knows
    -703: "absent",  # another process is still putting it
    -704: "absent",
    -706: "leased",
    -800: "peer",  # the process whose segment it is in does not answer
    -900: "master",
    -901: "master",
}


_PATIENCE = 59.0
"""Seconds, a little less than those after which the engine leaves a transfer to itself."""


def reason_of(code: int) -> str:
    """Name why the store did not do as asked; ``"master"`` where nobody answered."""
    return _REASONS.get(code, f"code {code}")


class Refused(Exception):
    """The store cannot be connected to; the message says what does not answer."""


class StoreClient(Protocol):
    """A client of a remote store; may be called from several threads.

    Buffers are addresses and sizes, several for each object, one behind the other in it. A call
    blocks, without the interpreter's lock, for as long as the store takes.
    """

    def exist(self, names: Sequence[str]) -> list[int]:
        """Say of each object whether it is there: 1, 0, or a negative code."""

    def put(
        self, names: Sequence[str], buffers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        """Store objects; 0 each, also where it is there already, or a negative code."""

    def get(
        self, names: Sequence[str], buffers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        """Read objects; the bytes of each, or a negative code: `STRAY` if it may still come."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, also those that somebody has just read."""

    def register(self, address: int, nbytes: int) -> bool:
        """Let objects be read into a range and stored from it; tell whether they can be."""

    def unregister(self, address: int) -> None:
        """Undo `register`."""

    def healthy(self) -> bool:
        """Tell, without blocking, whether the master answered the last time."""

    def reachable(self) -> bool:
        """Ask the master whether it is there; blocks for the deadline at the most, or two."""

    def close(self) -> None:
        """Leave the store. Nothing may be called afterwards."""


Connect: TypeAlias = Callable[[RemoteCacheTierConfig], StoreClient]
"""Makes a client; raises `Refused` where that cannot be done now."""


def check_installed() -> None:
    """Raise ImportError unless Mooncake's package is there; it is not imported."""
    if find_spec("mooncake") is None:
        raise ImportError(
            "a remote tier needs the module mooncake; pip install hostmem[remote]", name="mooncake"
        )


class MooncakeClient:
    """A client of Mooncake Store.

    Parameters
    ----------
    config : RemoteCacheTierConfig
        Where the master is.

    Raises
    ------
    Refused
        The master or the metadata server does not answer, or refuses.
    ImportError
        The package, or a library that it needs, is missing.

    Notes
    -----
    The engine holds the interpreter's lock while it connects and while it leaves: for a minute and
    a half where there is no master, as it comes. So the servers are asked first, by ourselves; and
    unless the environment says otherwise its calls end at the deadline.
    """

    def __init__(self, config: RemoteCacheTierConfig) -> None:
        milliseconds = str(max(round(config.deadline * 1000), 1))
        os.environ.setdefault("MC_RPC_TIMEOUT_MS", milliseconds)
        os.environ.setdefault("MC_RPC_CONNECT_TIMEOUT_MS", milliseconds)
        os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        host = _reach(config)
        self._config = config
        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup(
            config.host or host,
            config.metadata,
            config.local_segment,
            0,  # no buffer of its own: every byte goes through ranges of ours
            config.protocol,
            config.devices,
            config.master,
        )
        if code != 0:
            raise Refused(f"{config.master}: the store refused with code {code}")
        self._how = ReplicateConfig()
        self._how.replica_num = config.replicas

    def exist(self, names: Sequence[str]) -> list[int]:
        """Say of each object whether it is there: 1, 0, or a negative code."""
        found: list[int] = self._store.batch_is_exist(list(names))
        return found

    def put(
        self, names: Sequence[str], buffers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        """Store objects; 0 each, also where it is there already, or a negative code."""
        codes: list[int] = self._store.batch_put_from_multi_buffers(
            list(names), buffers, sizes, self._how
        )
        return codes

    def get(
        self, names: Sequence[str], buffers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        """Read objects; the bytes of each, or a negative code."""
        began = time.monotonic()
        codes: list[int] = self._store.batch_get_into_multi_buffers(list(names), buffers, sizes)
        if time.monotonic() - began < _PATIENCE:
            return codes
        return [code if code >= 0 else STRAY for code in codes]

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, also those that somebody has just read."""
        self._store.batch_remove(list(names), True)

    def register(self, address: int, nbytes: int) -> bool:
        """Let objects be read into a range and stored from it; tell whether they can be."""
        return bool(self._store.register_buffer(address, nbytes) == 0)

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        self._store.unregister_buffer(address)

    def healthy(self) -> bool:
        """Tell, without blocking, whether the master answered the last time."""
        return bool(self._store.health_check() == 0)

    def reachable(self) -> bool:
        """Ask the master whether it is there; blocks for the deadline at the most, or two."""
        try:
            _reach(self._config)
        except Refused:
            return False
        return self.healthy()

    def close(self) -> None:
        """Leave the store.

        Blocks for a second or two, with the interpreter's lock; where no master answers, a dozen.
        """
        self._store.close()


def _reach(config: RemoteCacheTierConfig) -> str:
    """Ask the servers whether they are there; say by which address of ours we reach them."""
    host, _, port = config.master.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), config.deadline) as link:
            ours: str = link.getsockname()[0]
    except OSError as error:
        raise Refused(f"the master {config.master} does not answer: {error}") from error
    if config.metadata.startswith(("http://", "https://")):
        from urllib.error import HTTPError  # slow to import, and of no use to anybody else
        from urllib.request import urlopen

        try:
            with urlopen(f"{config.metadata}?key=kvtier", timeout=config.deadline):
                pass
        except HTTPError as answer:
            answer.close()  # it has nothing of that name, but it is there
        except OSError as error:
            raise Refused(f"the metadata server {config.metadata} does not answer: {error}") from (
                error
            )
    return ours
