"""A real master, and processes that share its store: started, stopped and killed by their ids."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from tests.threads import DEADLINE

__all__ = ["Cluster", "HostProcess", "Master"]

_ROOT = Path(__file__).parents[2]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Master:
    """The master, with or without its metadata server; it can be started again on its ports.

    Parameters
    ----------
    log : Path
        Where its output goes.
    options : str
        Further ones of its command line.
    """

    def __init__(self, log: Path, *options: str) -> None:
        self._log = log
        self._options = options
        self._port, self._http, self._metrics = (_free_port() for _ in range(3))
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"127.0.0.1:{self._port}"
        self.metadata = f"http://127.0.0.1:{self._http}/metadata"
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        assert self._process is None
        spec = find_spec("mooncake")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        program = Path(spec.submodule_search_locations[0], "mooncake_master")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(program),
                    "--rpc_address=127.0.0.1",
                    f"--rpc_port={self._port}",
                    "--enable_http_metadata_server=true",
                    "--http_metadata_server_host=127.0.0.1",
                    f"--http_metadata_server_port={self._http}",
                    "--metrics_host=127.0.0.1",
                    f"--metrics_port={self._metrics}",
                    *self._options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + DEADLINE
        for port in (self._port, self._http):
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert self._process.poll() is None, f"the master ended: see {self._log}"
                assert time.monotonic() < deadline, "the master does not listen"
                os.sched_yield()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(DEADLINE)
            self._process = None


class HostProcess:
    """A process with a cache; see `tests.remote.host`. Each order has an answer, or fails in time.

    Parameters
    ----------
    log : Path
        Where its errors go.
    options : object
        Of `tests.remote.host.main`.
    """

    def __init__(self, log: Path, **options: Any) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.remote.host", json.dumps(options)],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self.read()  # it is ready

    def send(self, order: str, *arguments: Any) -> None:
        """Give an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([order, *arguments]).encode() + b"\n")
        self._process.stdin.flush()

    def read(self) -> Any:
        """Wait for an answer."""
        output = self._process.stdout
        assert output is not None
        deadline = time.monotonic() + 3 * DEADLINE
        line = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                left = max(deadline - time.monotonic(), 0)
                assert selector.select(left), f"no answer; see {self._log}"
                more = os.read(output.fileno(), 1)
                assert more, f"it ended: {self._log.read_text()[-2000:]}"
                line += more
        return json.loads(line)

    def __call__(self, order: str, *arguments: Any) -> Any:
        """Give an order and wait for the answer."""
        self.send(order, *arguments)
        return self.read()

    def until(self, order: str, *arguments: Any, is_: Any = True) -> None:
        """Repeat an order until its answer is the one wanted."""
        deadline = time.monotonic() + 2 * DEADLINE
        while (answer := self(order, *arguments)) != is_:
            assert time.monotonic() < deadline, f"{order} stays {answer}: {self('stats')}"

    def close(self) -> int:
        """Let it close its cache and end; its exit status."""
        self.send("close")
        return self._process.wait(3 * DEADLINE)

    def kill(self) -> None:
        """Kill it, if it runs."""
        self._process.kill()
        self._process.wait(DEADLINE)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Cluster:
    """A master and hosts; all of them are killed in the end."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._hosts = 0
        self.peer_to_peer = False
        """Whether the hosts find each other without the metadata server."""
        self.master: Master = self._new_master()

    def _new_master(self, *options: str) -> Master:
        master = Master(self._folder / "master.log", *options)
        self._stack.callback(master.kill)
        return master

    def host(self, **options: Any) -> HostProcess:
        """Start a host."""
        self._hosts += 1
        metadata = "P2PHANDSHAKE" if self.peer_to_peer else self.master.metadata
        host = HostProcess(
            self._folder / f"host{self._hosts}.log",
            **{"master": self.master.address, "metadata": metadata, **options},
        )
        self._stack.callback(host.kill)
        return host

    @classmethod
    @contextmanager
    def running(cls, folder: Path) -> Iterator[Self]:
        """Have one for the time of a ``with`` block."""
        with ExitStack() as stack:
            yield cls(folder, stack)
