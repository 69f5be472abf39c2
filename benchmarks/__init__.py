"""Measurements, in folders by subject. A benchmark is a command that runs Shoal and its peers in
one run, and reports the results. `make help` lists them; figures are in docs/benchmarks.md. Tests
of them are in tests/benchmarks.

`mesh/`: a mesh under normal load, its router and its telemetry. `http/`: the HTTP edge. `stress/`:
a mesh under adverse conditions. `scheduler/`: plans and scaling. `models/`: models, kernels and
adapters without a mesh; `images/`: image models; `gpu/`: all of it on a GPU. `peers/`: servers and
libraries to compare with. `common/`: texts, processes and reports.
"""
