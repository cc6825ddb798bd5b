"""The seam: the only package that knows C.

Above it there are integers, enums, numpy arrays and Python exceptions; cffi objects, casts,
``errno``, ``CUresult`` and magic numbers stay in here. It imports nothing of ours but the errors.
"""
