"""A kit for testing what is built on this library: faults at the seam, a driver without a GPU."""

from hostmem.testing.driver import FakeDriver
from hostmem.testing.faults import FaultPlan, Hold

__all__ = ["FakeDriver", "FaultPlan", "Hold"]
