"""The copy kernel: PTX text that the driver compiles, and what its arguments mean.

Copy engines take a descriptor of several microseconds for each small range; a kernel reads and
writes them at the speed of the bus. Its arguments are 64-bit integers: the address of a table of
`ROW` bytes a copy (destination, source, bytes, unused; addresses and bytes multiples of `GRAIN`),
the number of its rows, the pieces of `PIECE` bytes in the longest copy, and how many pieces a warp
takes at a time, at most `WARP`. Its threads read the row of one of them each, together and while
the pieces before are on their way: so the table may lie in host memory.
"""

from __future__ import annotations

__all__ = ["GRAIN", "NAME", "PIECE", "PROGRAM", "ROW", "THREADS", "WARP"]

NAME = "copy_pages"
THREADS = 256
"""Threads of a block; the program says so, too."""
WARP = 32
"""Threads that copy a piece together."""
PIECE, ROW, GRAIN = 4096, 32, 16
"""Bytes."""

# Reads what the thread's piece of the next share is; where it starts in its copy is %skip2.
_FETCH = """
    add.u32 %item, %base, %lane;
    setp.lt.and.u32 %there, %item, %items, %in;
    div.u32 %copy, %item, %pieces;
    mul.lo.u32 %piece, %copy, %pieces;
    sub.u32 %piece, %item, %piece;
    mul.wide.u32 %skip2, %piece, 4096;
    mul.wide.u32 %at, %copy, 32;
    add.u64 %at, %table, %at;
    @%there ld.global.v2.b64 {%to2, %from2}, [%at];
    @%there ld.global.b64 %size2, [%at+16];
"""

PROGRAM = f"""
.version 7.4
.target sm_70
.address_size 64

.visible .entry copy_pages(
    .param .u64 table, .param .u64 rows, .param .u64 pieces, .param .u64 share)
.maxntid 256, 1, 1
{{
    .reg .pred %in, %there, %more, %short, %past;
    .reg .b32 %item, %items, %pieces, %share, %base, %step, %copy, %piece, %lane, %t;
    .reg .b32 %count, %turn, %size, %size1, %low, %high;
    .reg .b32 %v<32>;
    .reg .b64 %table, %at, %to, %from, %shift, %done, %wide;
    .reg .b64 %to1, %from1, %to2, %from2, %size2, %skip2;

    ld.param.u64 %table, [table];
    ld.param.u64 %wide, [rows];
    cvt.u32.u64 %items, %wide;
    ld.param.u64 %wide, [pieces];
    cvt.u32.u64 %pieces, %wide;
    mul.lo.u32 %items, %items, %pieces;
    ld.param.u64 %wide, [share];
    cvt.u32.u64 %share, %wide;

    mov.u32 %t, %tid.x;
    and.b32 %lane, %t, 31;
    mul.wide.u32 %shift, %lane, 16;
    setp.lt.u32 %in, %lane, %share;
    mov.u32 %step, %ntid.x;
    mov.u32 %base, %ctaid.x;
    mad.lo.u32 %base, %base, %step, %t;
    shr.u32 %base, %base, 5;
    mul.lo.u32 %base, %base, %share;
    mov.u32 %t, %nctaid.x;
    mul.lo.u32 %step, %step, %t;
    shr.u32 %step, %step, 5;
    mul.lo.u32 %step, %step, %share;

    setp.ge.u32 %past, %base, %items;
    @%past bra DONE;
    mov.b64 %to2, 0;
    mov.b64 %from2, 0;
    mov.b64 %size2, 0;
{_FETCH}
SHARE:
    // A copy may have fewer pieces than the longest: then nothing is left of it here.
    add.u64 %to1, %to2, %skip2;
    add.u64 %from1, %from2, %skip2;
    max.u64 %wide, %size2, %skip2;
    sub.u64 %wide, %wide, %skip2;
    min.u64 %wide, %wide, 4096;
    cvt.u32.u64 %size1, %wide;
    sub.u32 %count, %items, %base;
    min.u32 %count, %count, %share;
    mov.u32 %turn, 0;
    add.u32 %base, %base, %step;
    setp.lt.u32 %more, %base, %items;
    @!%more bra PIECE;
{_FETCH}
PIECE:
    shfl.sync.idx.b32 %size, %size1, %turn, 31, 0xffffffff;
    mov.b64 {{%low, %high}}, %to1;
    shfl.sync.idx.b32 %low, %low, %turn, 31, 0xffffffff;
    shfl.sync.idx.b32 %high, %high, %turn, 31, 0xffffffff;
    mov.b64 %to, {{%low, %high}};
    mov.b64 {{%low, %high}}, %from1;
    shfl.sync.idx.b32 %low, %low, %turn, 31, 0xffffffff;
    shfl.sync.idx.b32 %high, %high, %turn, 31, 0xffffffff;
    mov.b64 %from, {{%low, %high}};
    add.u64 %to, %to, %shift;
    add.u64 %from, %from, %shift;
    add.u32 %turn, %turn, 1;
    setp.lt.u32 %short, %size, 4096;
    @%short bra PART;
    ld.global.cs.v4.b32 {{%v0, %v1, %v2, %v3}}, [%from];
    ld.global.cs.v4.b32 {{%v4, %v5, %v6, %v7}}, [%from+512];
    ld.global.cs.v4.b32 {{%v8, %v9, %v10, %v11}}, [%from+1024];
    ld.global.cs.v4.b32 {{%v12, %v13, %v14, %v15}}, [%from+1536];
    ld.global.cs.v4.b32 {{%v16, %v17, %v18, %v19}}, [%from+2048];
    ld.global.cs.v4.b32 {{%v20, %v21, %v22, %v23}}, [%from+2560];
    ld.global.cs.v4.b32 {{%v24, %v25, %v26, %v27}}, [%from+3072];
    ld.global.cs.v4.b32 {{%v28, %v29, %v30, %v31}}, [%from+3584];
    st.global.cs.v4.b32 [%to], {{%v0, %v1, %v2, %v3}};
    st.global.cs.v4.b32 [%to+512], {{%v4, %v5, %v6, %v7}};
    st.global.cs.v4.b32 [%to+1024], {{%v8, %v9, %v10, %v11}};
    st.global.cs.v4.b32 [%to+1536], {{%v12, %v13, %v14, %v15}};
    st.global.cs.v4.b32 [%to+2048], {{%v16, %v17, %v18, %v19}};
    st.global.cs.v4.b32 [%to+2560], {{%v20, %v21, %v22, %v23}};
    st.global.cs.v4.b32 [%to+3072], {{%v24, %v25, %v26, %v27}};
    st.global.cs.v4.b32 [%to+3584], {{%v28, %v29, %v30, %v31}};
    bra NEXT;

PART:
    cvt.u64.u32 %wide, %size;
    mov.b64 %done, %shift;
    setp.ge.u64 %past, %done, %wide;
    @%past bra NEXT;
LANE:
    ld.global.cs.v4.b32 {{%v0, %v1, %v2, %v3}}, [%from];
    st.global.cs.v4.b32 [%to], {{%v0, %v1, %v2, %v3}};
    add.u64 %from, %from, 512;
    add.u64 %to, %to, 512;
    add.u64 %done, %done, 512;
    setp.lt.u64 %past, %done, %wide;
    @%past bra LANE;

NEXT:
    bar.warp.sync 0xffffffff;
    setp.lt.u32 %past, %turn, %count;
    @%past bra PIECE;
    @%more bra SHARE;
DONE:
    ret;
}}
"""
