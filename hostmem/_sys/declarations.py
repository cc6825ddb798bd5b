"""The C declarations, as text, grouped by manual page or driver chapter.

`python -m hostmem._sys.build` turns them into the checked-in ABI modules. A declaration is exactly
what the named header says, so that a compiler can hold the same text against the real header
(the test does). The version is the first kernel or CUDA release that has the thing.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CUDA", "LINUX", "Section"]


class Section(NamedTuple):
    """One group of declarations."""

    source: str
    """The manual page or the driver API chapter."""
    since: str
    """First release that has all of it."""
    headers: tuple[str, ...]
    """Headers that declare the same; empty where no header does."""
    text: str
    """The declarations."""


LINUX = (
    Section(
        "mmap(2), mprotect(2), madvise(2)",
        "2.6; MADV_POPULATE_WRITE (23) since 5.14",
        ("sys/mman.h",),
        """
        void *mmap(void *addr, size_t length, int prot, int flags, int fd, long offset);
        int munmap(void *addr, size_t length);
        int mprotect(void *addr, size_t length, int prot);
        int madvise(void *addr, size_t length, int advice);
        """,
    ),
    Section(
        "mbind(2), get_mempolicy(2), move_pages(2): glibc has no wrappers",
        "2.6.18",
        ("unistd.h", "sys/syscall.h"),
        """
        long syscall(long number, ...);
        """,
    ),
    Section(
        "process_vm_readv(2), preadv(2)",
        "3.2",
        ("sys/uio.h",),
        """
        struct iovec { void *iov_base; size_t iov_len; };
        ssize_t process_vm_readv(int pid, const struct iovec *local_iov, unsigned long liovcnt,
                                 const struct iovec *remote_iov, unsigned long riovcnt,
                                 unsigned long flags);
        ssize_t preadv(int fd, const struct iovec *iov, int iovcnt, long offset);
        ssize_t pwritev(int fd, const struct iovec *iov, int iovcnt, long offset);
        """,
    ),
    Section(
        "ioctl(2) on /proc/PID/pagemap: PAGEMAP_SCAN",
        "6.7",
        ("sys/ioctl.h",),
        """
        int ioctl(int fd, unsigned long request, ...);
        """,
    ),
    Section(
        "Documentation/admin-guide/mm/pagemap.rst",
        "6.7",
        (),
        """
        struct page_region { uint64_t start; uint64_t end; uint64_t categories; };
        struct pm_scan_arg {
            uint64_t size; uint64_t flags; uint64_t start; uint64_t end; uint64_t walk_end;
            uint64_t vec; uint64_t vec_len; uint64_t max_pages; uint64_t category_inverted;
            uint64_t category_mask; uint64_t category_anyof_mask; uint64_t return_mask;
        };
        """,
    ),
)

# A pointer to syscall() with a fixed prototype: on the ABIs served here integer arguments travel
# alike, and a fixed call costs a fraction of a variadic one.
LINUX_INTERNAL = """
typedef long (*raw_syscall_t)(long, long, long, long, long, long, long);
"""

CUDA = (
    Section(
        "Data types used by CUDA driver",
        "12.8",
        ("cuda.h",),
        """
        typedef int CUdevice;
        typedef unsigned long long CUdeviceptr;
        typedef struct CUctx_st *CUcontext;
        typedef struct CUstream_st *CUstream;
        typedef struct CUfunc_st *CUfunction;
        """,
    ),
    Section(
        "Driver Entry Point Access",
        "12.0",
        (),  # the header's CUresult is an enum, an int to this ABI
        """
        int cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion,
                                uint64_t flags, int *symbolStatus);
        """,
    ),
)

# Prototypes of what the table in driver.py resolves. cuMemcpyBatchAsync has two shapes: with the
# failing index (12.8) and without (13.0); the plain symbol keeps the old one for ever.
CUDA_POINTERS = """
typedef struct { int type; int id; } location_t;
typedef struct {
    int srcAccessOrder; location_t srcLocHint; location_t dstLocHint; unsigned int flags;
} batch_attributes_t;
typedef int (*context_push_t)(CUcontext);
typedef int (*context_pop_t)(CUcontext *);
typedef int (*host_register_t)(void *, size_t, unsigned int);
typedef int (*host_unregister_t)(void *);
typedef int (*host_device_pointer_t)(CUdeviceptr *, void *, unsigned int);
typedef int (*pointer_t)(unsigned int, int *, void **, CUdeviceptr);
typedef int (*copy_async_t)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
typedef int (*launch_t)(CUfunction, unsigned int, unsigned int, unsigned int, unsigned int,
                        unsigned int, unsigned int, unsigned int, CUstream, void **, void **);
typedef int (*copy_batch_12080_t)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t,
                                  batch_attributes_t *, size_t *, size_t, size_t *, CUstream);
typedef int (*copy_batch_13000_t)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t,
                                  batch_attributes_t *, size_t *, size_t, CUstream);
"""
