"""Plug-ins of engines: each imports its engine only when it is used, and says which it knows.

Nothing in `kvtier` imports anything from here.
"""
