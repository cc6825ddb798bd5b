"""The copy kernel: PTX text that the driver compiles, and what its arguments mean.

Copy engines take a descriptor of several microseconds for each small range; a kernel reads and
writes them at the speed of the bus. Its arguments are 64-bit integers: the address of a table of
`ROW` bytes a copy (destination, source, bytes, unused; addresses and bytes multiples of `GRAIN`),
the number of its rows, and the pieces of `PIECE` bytes in the longest copy. Each warp takes a piece
at a time.
"""

from __future__ import annotations

__all__ = ["GRAIN", "NAME", "PIECE", "PROGRAM", "ROW", "THREADS", "WARP"]

NAME = "copy_pages"
THREADS = 256
"""Threads of a block; the program says so, too."""
WARP = 32
"""Threads that take a piece together."""
PIECE, ROW, GRAIN = 4096, 32, 16
"""Bytes."""

PROGRAM = """
.version 7.4
.target sm_70
.address_size 64

.visible .entry copy_pages(.param .u64 table, .param .u64 rows, .param .u64 pieces)
.maxntid 256, 1, 1
{
    .reg .pred %more, %short, %past;
    .reg .b32 %item, %items, %step, %pieces, %copy, %piece, %lane, %t;
    .reg .b32 %v<32>;
    .reg .b64 %rows, %at, %to, %from, %size, %to2, %from2, %size2, %skip, %skip2, %shift, %wide;

    ld.param.u64 %rows, [table];
    ld.param.u64 %wide, [rows];
    cvt.u32.u64 %items, %wide;
    ld.param.u64 %wide, [pieces];
    cvt.u32.u64 %pieces, %wide;
    mul.lo.u32 %items, %items, %pieces;

    mov.u32 %t, %tid.x;
    and.b32 %lane, %t, 31;
    mul.wide.u32 %shift, %lane, 16;
    mov.u32 %step, %ntid.x;
    mov.u32 %item, %ctaid.x;
    mad.lo.u32 %item, %item, %step, %t;
    shr.u32 %item, %item, 5;
    mov.u32 %t, %nctaid.x;
    mul.lo.u32 %step, %step, %t;
    shr.u32 %step, %step, 5;

    setp.ge.u32 %more, %item, %items;
    @%more bra DONE;
    div.u32 %copy, %item, %pieces;
    mul.lo.u32 %piece, %copy, %pieces;
    sub.u32 %piece, %item, %piece;
    mul.wide.u32 %skip2, %piece, 4096;
    mul.wide.u32 %at, %copy, 32;
    add.u64 %at, %rows, %at;
    ld.global.v2.b64 {%to2, %from2}, [%at];
    ld.global.b64 %size2, [%at+16];

ITEM:
    mov.b64 %to, %to2;
    mov.b64 %from, %from2;
    mov.b64 %size, %size2;
    mov.b64 %skip, %skip2;
    // The next item's row comes while this one's bytes are on their way.
    add.u32 %item, %item, %step;
    setp.lt.u32 %more, %item, %items;
    @!%more bra COPY;
    div.u32 %copy, %item, %pieces;
    mul.lo.u32 %piece, %copy, %pieces;
    sub.u32 %piece, %item, %piece;
    mul.wide.u32 %skip2, %piece, 4096;
    mul.wide.u32 %at, %copy, 32;
    add.u64 %at, %rows, %at;
    ld.global.v2.b64 {%to2, %from2}, [%at];
    ld.global.b64 %size2, [%at+16];

COPY:
    setp.ge.u64 %past, %skip, %size;
    @%past bra NEXT;  // this copy has fewer pieces than the longest
    sub.u64 %size, %size, %skip;
    add.u64 %skip, %skip, %shift;
    add.u64 %to, %to, %skip;
    add.u64 %from, %from, %skip;
    setp.lt.u64 %short, %size, 4096;
    @%short bra PART;
    ld.global.cs.v4.b32 {%v0, %v1, %v2, %v3}, [%from];
    ld.global.cs.v4.b32 {%v4, %v5, %v6, %v7}, [%from+512];
    ld.global.cs.v4.b32 {%v8, %v9, %v10, %v11}, [%from+1024];
    ld.global.cs.v4.b32 {%v12, %v13, %v14, %v15}, [%from+1536];
    ld.global.cs.v4.b32 {%v16, %v17, %v18, %v19}, [%from+2048];
    ld.global.cs.v4.b32 {%v20, %v21, %v22, %v23}, [%from+2560];
    ld.global.cs.v4.b32 {%v24, %v25, %v26, %v27}, [%from+3072];
    ld.global.cs.v4.b32 {%v28, %v29, %v30, %v31}, [%from+3584];
    st.global.cs.v4.b32 [%to], {%v0, %v1, %v2, %v3};
    st.global.cs.v4.b32 [%to+512], {%v4, %v5, %v6, %v7};
    st.global.cs.v4.b32 [%to+1024], {%v8, %v9, %v10, %v11};
    st.global.cs.v4.b32 [%to+1536], {%v12, %v13, %v14, %v15};
    st.global.cs.v4.b32 [%to+2048], {%v16, %v17, %v18, %v19};
    st.global.cs.v4.b32 [%to+2560], {%v20, %v21, %v22, %v23};
    st.global.cs.v4.b32 [%to+3072], {%v24, %v25, %v26, %v27};
    st.global.cs.v4.b32 [%to+3584], {%v28, %v29, %v30, %v31};
    bra NEXT;

PART:
    setp.ge.u64 %past, %shift, %size;
    mov.b64 %wide, %shift;
    @%past bra NEXT;
LANE:
    ld.global.cs.v4.b32 {%v0, %v1, %v2, %v3}, [%from];
    st.global.cs.v4.b32 [%to], {%v0, %v1, %v2, %v3};
    add.u64 %from, %from, 512;
    add.u64 %to, %to, 512;
    add.u64 %wide, %wide, 512;
    setp.lt.u64 %past, %wide, %size;
    @%past bra LANE;

NEXT:
    @%more bra ITEM;
DONE:
    ret;
}
"""
