"""Benchmarks, run as ``python -m bench.NAME``; each states its machine, command and spread."""
