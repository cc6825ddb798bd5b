"""The probe of driver calls, against a driver that the test leads."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from bench.probe import (
    CALLS,
    NoCompilerError,
    Probe,
    ProbeError,
    Stalls,
    built,
    calls_of,
    most_blocked,
    worst_call,
)
from tests.bench.conftest import Stub
from tests.threads import Spawn, Until

LONG = 0.5e-3  # seconds from which a call counts as blocked


@pytest.fixture
def probe(probe_library: Path, stub_here: Path, stub: Stub) -> Probe:
    return Probe(probe_library, 0, driver=str(stub_here))


def test_each_kind_of_call_is_made_again_and_again(probe: Probe, until: Until) -> None:
    with probe:
        until(lambda: all(seen.calls > 3 for seen in probe.read().values()))
        assert list(probe.read()) == list(CALLS)


def test_only_the_chosen_kinds_are_made(
    probe_library: Path, stub_here: Path, stub: Stub, until: Until
) -> None:
    stub.hold("cuLaunchKernel")  # whoever launched would never come up
    with Probe(probe_library, 0, ["memory"], driver=str(stub_here)) as probe:
        until(lambda: probe.read()["memory"].calls > 3)
        assert list(probe.read()) == ["memory"]
    assert not stub.is_held("cuLaunchKernel")


def test_calls_that_wait_for_a_registration_count_as_blocked_while_they_wait_and_after(
    probe: Probe, stub_here: Path, stub: Stub, spawn: Spawn, until: Until
) -> None:
    driver = ctypes.CDLL(str(stub_here))
    with probe:
        stub.hold("cuMemHostRegister")
        registering = spawn(driver.cuMemHostRegister_v2, None, ctypes.c_size_t(0), 0)
        stub.wait_held("cuMemHostRegister")
        until(lambda: all(seen.long_calls for seen in probe.read().values()))
        before = probe.read()
        until(lambda: all(probe.read()[name].worst > before[name].worst for name in CALLS))
        assert all(one.calls == before[name].calls for name, one in probe.read().items())
        stub.release("cuMemHostRegister")
        until(lambda: all(one.calls > before[name].calls for name, one in probe.read().items()))
        for name, one in probe.read().items():
            assert one.worst > before[name].worst > LONG
            assert one.blocked >= one.worst
            assert one.long_calls >= 1
        assert registering.result() == 0


def test_of_a_call_that_runs_when_a_window_begins_only_the_rest_counts(
    probe: Probe, stub: Stub, until: Until
) -> None:
    with probe:
        stub.hold("cuPointerGetAttribute")
        until(lambda: probe.read()["attribute"].worst > 10 * LONG)
        probe.reset()
        seen = probe.read()["attribute"]
        assert seen.calls == 0
        assert seen.worst <= seen.seconds
        assert seen.blocked <= seen.seconds
        until(lambda: probe.read()["attribute"].long_calls == 1)
        stub.release("cuPointerGetAttribute")
        until(lambda: probe.read()["attribute"].calls > 0)
        seen = probe.read()["attribute"]
        assert LONG < seen.worst <= seen.seconds


def test_memset_and_launch_include_the_wait_for_the_gpu(
    probe: Probe, stub: Stub, until: Until
) -> None:
    with probe:
        stub.hold("cuStreamSynchronize")
        until(lambda: all(probe.read()[name].long_calls for name in ("memset", "launch")))
        stub.release("cuStreamSynchronize")


def test_a_call_that_the_driver_refuses_is_an_error_of_the_next_look(
    probe: Probe, stub: Stub, until: Until
) -> None:
    def refused() -> bool:
        try:
            probe.reset()  # which does not forgive it
            probe.read()
        except ProbeError as error:
            return str(error) == "the driver answered 700 to the probe's call: launch"
        return False

    with probe:
        stub.refuse("cuLaunchKernel", 700)
        until(refused)


def test_a_driver_that_refuses_to_start_is_an_error_that_names_the_call(
    probe: Probe, stub: Stub
) -> None:
    stub.refuse("cuInit", 100)
    with pytest.raises(ProbeError, match="cuInit: the driver answered 100"), probe:
        pass


def test_no_driver_is_an_error_that_names_the_library(probe_library: Path) -> None:
    probe = Probe(probe_library, 0, driver="libnowhere.so.1")
    with pytest.raises(ProbeError, match=r"libnowhere\.so\.1"), probe:
        pass


def test_there_is_one_probe_a_process_at_a_time(probe: Probe, until: Until) -> None:
    with probe:
        with pytest.raises(ProbeError, match="runs in this process already"), probe:
            pass
        until(lambda: probe.read()["launch"].calls > 3)
    with probe:
        until(lambda: probe.read()["launch"].calls > 3)


@pytest.mark.parametrize(("compiler", "named"), [("no-such-cc -O1", "no-such-cc"), ("", "gcc")])
def test_without_a_compiler_it_says_what_to_install(
    compiler: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(NoCompilerError, match=f"(?s){named}.*libc6-dev"), built():
        pass


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho no headers here >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(ProbeError, match="no headers here"), built():
        pass


def test_kinds_of_calls_are_read_in_order_and_checked() -> None:
    assert calls_of("launch,attribute") == ["attribute", "launch"]
    with pytest.raises(ValueError, match="malloc"):
        calls_of("attribute,malloc")


def test_shares_are_of_the_window_and_the_worst_kind_counts() -> None:
    none = Stalls(0, 0, 0.0, 0.0, 0.0)
    half = Stalls(calls=9, long_calls=2, worst=0.004, blocked=0.5, seconds=1.0)
    other = Stalls(calls=9, long_calls=1, worst=0.007, blocked=0.007, seconds=1.0)
    assert none.share == 0
    assert half.share == 0.5
    assert most_blocked({"a": half, "b": other}) == 0.5
    assert worst_call({"a": half, "b": other}) == 0.007
