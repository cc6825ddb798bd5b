"""The C declarations are what the headers say, and the generated modules are what the text says."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hostmem._sys import _cuda_abi, _linux_abi, build, declarations, driver, linux
from hostmem._sys.declarations import Section

STRUCT = re.compile(r"struct (\w+) \{[^}]*\};")


@pytest.mark.parametrize("name", ["_linux_abi.py", "_cuda_abi.py"])
def test_the_checked_in_module_is_what_the_text_generates(tmp_path: Path, name: str) -> None:
    build.generate(tmp_path)
    checked_in = Path(build.__file__).parent / name
    assert (tmp_path / name).read_text() == checked_in.read_text(), (
        "declarations.py changed: run python -m hostmem._sys.build"
    )


@pytest.fixture(params=list(linux._SYSCALLS_OF))
def machine(request: pytest.FixtureRequest) -> str:
    """The machines that are served; the declarations are the same on all of them."""
    return str(request.param)


@pytest.fixture
def compiler(machine: str) -> str:
    names = ["gcc", "cc"] if machine == platform.machine() else [f"{machine}-linux-gnu-gcc"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"no C compiler for {machine}: {' or '.join(names)}")
    return found


@pytest.fixture
def cuda_headers() -> Path:
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [Path(root) / "include" for root in roots if root]
    folders += sorted(Path("/usr/local").glob("cuda-*/include"), reverse=True)
    for folder in [*folders, Path("/usr/include")]:
        if (folder / "cudaTypedefs.h").exists():
            return folder
    pytest.skip("no CUDA headers")


def compile_text(compiler: str, text: str, *options: str) -> str:
    """Compile C text; return what the compiler has against it."""
    result = subprocess.run(
        [compiler, "-std=gnu11", "-Wall", "-Werror", "-fsyntax-only", *options, "-x", "c", "-"],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return result.stderr if result.returncode else ""


def includes(*headers: str) -> str:
    return "#define _GNU_SOURCE\n" + "".join(
        f"#include <{h}>\n" for h in ("stddef.h", "stdint.h", *headers)
    )


def same(expression: str, value: int) -> str:
    return f'_Static_assert({expression} == {value}, "{expression} is not {value}");\n'


def same_layout(ours: Any, theirs: str) -> str:
    """Assert that a C struct has the size and the fields, by name and place, of a declared one."""
    ffi = _linux_abi.ffi
    text = same(f"sizeof({theirs})", ffi.sizeof(ours))
    for name, field in ours.fields:
        text += same(f"offsetof({theirs}, {name})", field.offset)
        text += same(f"sizeof((({theirs} *)0)->{name})", ffi.sizeof(field.type))
    return text


def test_the_compiler_is_asked_in_earnest(compiler: str) -> None:
    text = includes("sys/mman.h") + "int munmap(void *addr, int length);\n"
    assert "conflicting types" in compile_text(compiler, text)
    assert "is not 8" in compile_text(compiler, same("sizeof(char)", 8))


# ------------------------------------------------------------------------------------- Linux


@pytest.mark.parametrize(
    "section",
    [s for s in declarations.LINUX if s.headers],
    ids=lambda s: s.source.partition(":")[0],
)
def test_a_section_is_what_its_headers_declare(compiler: str, section: Section) -> None:
    text = includes(*section.headers) + STRUCT.sub("", section.text)
    for name in STRUCT.findall(section.text):
        text += same_layout(_linux_abi.ffi.typeof(f"struct {name}"), f"struct {name}")
    assert compile_text(compiler, text) == ""


def test_the_scan_of_the_pagemap_is_what_the_kernel_declares(compiler: str) -> None:
    # Since Linux 6.7; older headers lack it, and then there is nothing to compare with.
    text = includes("linux/fs.h") + "#ifdef PAGEMAP_SCAN\n"
    text += same("PAGEMAP_SCAN", linux._PAGEMAP_SCAN)
    text += same("PAGE_IS_PRESENT", linux._PAGE_IS_PRESENT)
    text += same("PAGE_IS_HUGE", linux._PAGE_IS_HUGE)
    for name in ("page_region", "pm_scan_arg"):
        text += same_layout(_linux_abi.ffi.typeof(f"struct {name}"), f"struct {name}")
    assert compile_text(compiler, text + "#endif\n") == ""


def test_the_request_of_the_scan_carries_the_size_of_its_argument() -> None:
    # _IOWR('f', 16, struct pm_scan_arg): direction 3, size, type, number (ioctl(2)).
    size = _linux_abi.ffi.sizeof("struct pm_scan_arg")
    request = 3 << 30 | size << 16 | ord("f") << 8 | 16
    assert request == linux._PAGEMAP_SCAN


def test_the_numbers_of_memory_calls_are_the_headers(compiler: str) -> None:
    text = includes("sys/mman.h")
    text += same("PROT_NONE", linux._PROT_NONE)
    text += same("(PROT_READ | PROT_WRITE)", linux._PROT_READ_WRITE)
    text += same("MAP_PRIVATE", linux._MAP_PRIVATE)
    text += same("MAP_ANONYMOUS", linux._MAP_ANONYMOUS)
    text += same("MAP_NORESERVE", linux._MAP_NORESERVE)
    for number, name in linux._ADVICE.items():
        text += f"#ifdef {name}\n" + same(name, number) + "#endif\n"
    assert compile_text(compiler, text) == ""


def test_the_numbers_of_raw_calls_are_the_headers(compiler: str, machine: str) -> None:
    text = includes("sys/syscall.h")
    for name, number in linux._SYSCALLS_OF[machine].items():
        text += same(f"SYS_{name}", number)
    assert compile_text(compiler, text) == ""


def test_the_numbers_of_policies_are_the_headers(compiler: str) -> None:
    text = includes("linux/mempolicy.h")
    for policy in list(linux.Policy)[:5]:  # enumerators: newer ones cannot be asked for by #ifdef
        text += same(f"MPOL_{policy.name}", policy)
    assert compile_text(compiler, text) == ""


def test_most_segments_of_a_call_are_the_headers(compiler: str) -> None:
    text = includes("linux/uio.h") + same("UIO_MAXIOV", linux.IOV_MAX)
    assert compile_text(compiler, text) == ""


# -------------------------------------------------------------------------------------- CUDA


@pytest.mark.parametrize(
    "section", [s for s in declarations.CUDA if s.headers], ids=lambda s: s.source
)
def test_a_section_is_what_cudas_headers_declare(
    compiler: str, cuda_headers: Path, section: Section
) -> None:
    text = includes(*section.headers) + section.text
    assert compile_text(compiler, text, f"-I{cuda_headers}") == ""


def prototype(function: Any, name: str) -> str:
    """Write a declared function type as C, with the header's names for our types."""
    theirs = {
        "batch_attributes_t *": "CUmemcpyAttributes *",
        "int *": "CUpointer_attribute *",  # what is an int to us is an enumeration there
    }
    arguments = ", ".join(theirs.get(a.cname, a.cname) for a in function.args)
    return f"typedef CUresult (*{name})({arguments});\n"


@pytest.mark.parametrize("key", driver._ENTRIES)
def test_an_entry_point_has_the_prototype_of_its_version(
    compiler: str, cuda_headers: Path, key: str
) -> None:
    entry = driver._ENTRIES[key]
    theirs = f"PFN_{entry.name}_v{entry.version}"
    text = includes("cuda.h", "cudaTypedefs.h") + f"#if CUDA_VERSION >= {entry.version}\n"
    text += prototype(_cuda_abi.ffi.typeof(entry.prototype), "ours")
    text += same(f"__builtin_types_compatible_p(ours, {theirs})", 1) + "#endif\n"
    text += same("sizeof(CUpointer_attribute)", _cuda_abi.ffi.sizeof("int"))
    assert compile_text(compiler, text, f"-I{cuda_headers}") == ""


def test_the_entry_point_of_entry_points_has_its_prototype(
    compiler: str, cuda_headers: Path
) -> None:
    text = includes("cuda.h", "cudaTypedefs.h")
    (declared,) = (s.text for s in declarations.CUDA if "cuGetProcAddress_v2" in s.text)
    # What is an int to us is an enumeration there.
    declared = declared.replace("int cuGetProcAddress_v2(", "typedef CUresult (*ours)(")
    text += declared.replace("int *symbolStatus", "CUdriverProcAddressQueryResult *symbolStatus")
    text += same("__builtin_types_compatible_p(ours, PFN_cuGetProcAddress_v12000)", 1)
    text += same("sizeof(CUdriverProcAddressQueryResult)", 4)
    assert compile_text(compiler, text, f"-I{cuda_headers}") == ""


def test_the_attributes_of_a_batch_lie_as_cudas_do(compiler: str, cuda_headers: Path) -> None:
    text = includes("cuda.h")
    text += same_layout(_cuda_abi.ffi.typeof("batch_attributes_t"), "CUmemcpyAttributes")
    text += same_layout(_cuda_abi.ffi.typeof("location_t"), "CUmemLocation")
    assert compile_text(compiler, text, f"-I{cuda_headers}") == ""


def test_the_drivers_answers_have_cudas_numbers(compiler: str, cuda_headers: Path) -> None:
    text = includes("cuda.h") + same("CUDA_SUCCESS", 0)
    for result in driver.Result:
        if result:
            text += same(f"CUDA_ERROR_{result.name}", result)
    assert compile_text(compiler, text, f"-I{cuda_headers}") == ""


def test_flags_and_attributes_have_cudas_numbers(compiler: str, cuda_headers: Path) -> None:
    numbers = {
        "CU_MEMHOSTREGISTER_PORTABLE": driver._REGISTER_PORTABLE,
        "CU_MEMHOSTREGISTER_DEVICEMAP": driver._REGISTER_DEVICEMAP,
        "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM": driver._ACCESS_ORDER_STREAM,
        "CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID": driver.HOST_NUMA_ID.number,
        "CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS": driver.PAGEABLE_ACCESS.number,
        "CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES": (
            driver.HOST_PAGE_TABLES.number
        ),
        "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": driver.HOST_POINTERS.number,
        "CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED": driver.HOST_REGISTER.number,
    }
    text = includes("cuda.h") + "".join(same(name, value) for name, value in numbers.items())
    assert compile_text(compiler, text, f"-I{cuda_headers}") == ""
