"""Measurements: each module is a command that runs Shoal and its peers in one run, and says what it measured. `make help` lists
them; figures are in docs/benchmarks.md. Tests of them are in tests/benchmarks."""
