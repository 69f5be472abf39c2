"""Tests of the computations and claims of benchmarks; the measurements are not run here."""
