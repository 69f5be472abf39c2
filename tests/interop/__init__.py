"""Unmodified clients of other vendors against the edge of a real mesh: `make interop`."""
