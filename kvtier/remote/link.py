"""The connection to a store: made when it is first needed, and watched."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvtier.config import RemoteCacheTierConfig
from kvtier.remote.client import Connect, Refused, StoreClient, reason_of
from kvtier.remote.health import Health
from kvtier.remote.ranges import Ranges

__all__ = ["Link"]

log = logging.getLogger("kvtier")


class Link:
    """A client, once there is one, and whether the store behind it is worth asking.

    Parameters
    ----------
    config : RemoteCacheTierConfig
        Where the store is.
    connect : callable
        Makes the client.
    clock : callable
        Gives seconds that never go back.
    """

    def __init__(
        self,
        config: RemoteCacheTierConfig,
        connect: Connect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._connect = connect
        self._making = threading.Lock()
        self._client: StoreClient | None = None
        self._ranges: Ranges | None = None
        self.health = Health(clock)
        """Whether to ask the store."""

    def open(self) -> tuple[StoreClient, Ranges]:
        """Give the client, and what is registered with it; blocks while it is made.

        Raises
        ------
        Refused
            The store does not answer, and was found not to a moment ago or now.
        """
        with self._making:
            try:
                if self._client is None:
                    self._client = self._connect(self._config)
                    self._ranges = Ranges(self._client)
                elif not self._client.healthy():
                    raise Refused(f"the master {self._config.master} did not answer")
            except Exception as error:
                self.health.failed(error)
                raise Refused(str(error)) from error
            assert self._ranges is not None  # made with the client
            return self._client, self._ranges

    def heard(self, codes: Sequence[int], *, late: bool = False) -> None:
        """Note the answer to a call: whether it came from the store, in time, or says otherwise."""
        silent = [code for code in codes if code < 0 and reason_of(code) == "master"]
        if codes and len(silent) == len(codes):
            self.health.failed(f"its calls end with code {silent[0]}")
        elif late:
            self.health.failed("an answer came later than the deadline")
        else:
            self.health.answered()

    def close(self) -> bool:
        """Leave the store, and tell whether nothing of it goes on. Nobody may be in a call.

        Where nobody answers, nobody is told: each range would wait for the deadline, and all
        threads of the process for a dozen seconds. The end of the process sees to it.
        """
        with self._making:
            client, self._client = self._client, None
            if client is None or self._ranges is None:
                return client is None
            if client.reachable():
                self._ranges.close()
                client.close()
                return True
            log.warning("the remote store does not answer: left without telling it")
            _abandoned.append(client)
            return False


_abandoned: list[StoreClient] = []
"""Clients that the end of the process ends."""
