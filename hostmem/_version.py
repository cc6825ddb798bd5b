"""The version, kept here and nowhere else: the build reads it, and so does the package."""

__version__ = "0.1.0"
