"""`HostMem` behind the allocator interfaces of other libraries.

Each module imports its library when it is imported itself, and says which versions it knows.
Nothing in `hostmem` imports anything from here.
"""
