"""A storage that is closed under way, or carried into a forked child."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import pytest

from hostmem import CpuDevice, resolve_device
from hostmem.courier import Courier
from hostmem.device.cpu import CpuStream
from hostmem.errors import ResourceBusyError

BUILD = """
    import os, signal, sys, threading
    import kvtier
    from hostmem import ClosedError
    from hostmem.testing import FaultPlan

    layer = kvtier.AttentionLayerConfig(0, [kvtier.BufferConfig("kv", "64KiB")])
    tiers = [kvtier.GpuCacheTierConfig("2MiB", "2MiB"), kvtier.HostCacheTierConfig("4MiB", "4MiB")]
    storage = kvtier.TierStorage(kvtier.KVCacheManagerConfig(16, tiers, [layer]), device="cpu")
    cache = kvtier.BlockCache(storage)
    hot, host = (level.groups[0].memory.pools[0].memory for level in storage.levels)
    host.wait_usable(host.size)
    with cache.reserve(range(32)) as fresh:
        fresh.wait()
        fresh.commit()
"""


def run(code: str) -> str:
    """Run code in a process of its own; returns what it printed."""
    whole = textwrap.dedent(BUILD) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-Wignore::DeprecationWarning", "-c", whole],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_interrupted_close_takes_no_memory_from_under_a_copy() -> None:
    printed = run("""
        def interrupt():
            hold.wait_reached()
            while not storage._closed:
                pass
            os.kill(os.getpid(), signal.SIGINT)

        # A background job's children inherit SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with FaultPlan() as plan:
            hold = plan.hold("process_vm_readv")
            waiting = cache.reserve(range(100, 132))  # all 32 go down
            threading.Thread(target=interrupt).start()
            try:
                storage.close()
            except KeyboardInterrupt:
                print(hot.closed, host.closed)
            hold.release()
            storage.close()
        print(hot.closed, host.closed)
    """)
    assert printed.split() == ["False", "False", "True", "True"]


@pytest.mark.parametrize(
    "call", ["cache.acquire([0])", "cache.reserve([999])", "storage.adjust_cache_level(1, '2MiB')"]
)
def test_a_forked_child_is_told_that_the_storage_is_its_parents(call: str) -> None:
    printed = run(f"""
        if (child := os.fork()) == 0:
            try:
                {call}
            except ClosedError:
                print("closed", flush=True)
            storage.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with cache.acquire([0]) as lease:
            lease.wait()
            print(len(lease))
        storage.close()
    """)
    assert printed.split() == ["closed", "1"]


def test_a_fork_while_another_thread_holds_the_lock_leaves_a_child_that_answers() -> None:
    printed = run("""
        held, leave = threading.Event(), threading.Event()

        def holder():
            with storage.lock:
                held.set()
                leave.wait()

        thread = threading.Thread(target=holder)
        thread.start()
        held.wait()
        if (child := os.fork()) == 0:
            try:
                cache.acquire([0])
            except ClosedError:
                print("closed", flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        leave.set()
        thread.join()
        storage.close()
    """)
    assert printed.split() == ["closed"]


def refuse_first(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the first thread of that name not start."""
    start = threading.Thread.start
    refused: list[str] = []

    def refusing(thread: threading.Thread) -> None:
        if thread.name == name and not refused:
            refused.append(name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)


def test_a_stream_whose_thread_could_not_start_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device = resolve_device("cpu")
    assert isinstance(device, CpuDevice)
    stream = device.stream()
    assert isinstance(stream, CpuStream)
    refuse_first(monkeypatch, "hostmem-cpu-stream")
    with pytest.raises(RuntimeError, match="can't start new thread"):
        stream.synchronize()
    stream.synchronize()
    stream.close()


def test_a_courier_that_cannot_start_says_which_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_first(monkeypatch, "spawned")
    courier = Courier("spawned")
    with pytest.raises(ResourceBusyError, match="RLIMIT_NPROC"):
        courier.start()
    assert os.getpid() != courier._pid
