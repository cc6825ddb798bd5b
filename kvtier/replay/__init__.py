"""Replay of request traces: reading and generating them, serving them, and saying what came out."""

from kvtier.replay.destination import check_destination
from kvtier.replay.generator import generate, write_trace
from kvtier.replay.metadata import MetadataResult, replay_metadata
from kvtier.replay.options import ReplayOptions
from kvtier.replay.progress import Progress
from kvtier.replay.recording import Recording
from kvtier.replay.report import write_report
from kvtier.replay.summary import (
    Latency,
    LevelUse,
    ReplayResult,
    format_summary,
    write_json,
)
from kvtier.replay.trace import Request, TraceError, read_trace

__all__ = [
    "Latency",
    "LevelUse",
    "MetadataResult",
    "Progress",
    "Recording",
    "ReplayOptions",
    "ReplayResult",
    "Request",
    "TraceError",
    "check_destination",
    "format_summary",
    "generate",
    "read_trace",
    "replay_metadata",
    "write_json",
    "write_report",
    "write_trace",
]
