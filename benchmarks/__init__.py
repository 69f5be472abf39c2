"""Measurements, in rooms by what is measured. A benchmark is a command that runs Shoal and its
peers in one run, and says what it measured. `make help` lists them; figures are in
docs/benchmarks.md. Tests of them are in tests/benchmarks.

`mesh/`: a mesh at work, its router and its telemetry. `http/`: HTTP in front of it. `stress/`: a
mesh in trouble. `scheduler/`: plans and scaling. `models/`: models, kernels and adapters without a
mesh; `images/`: those of images; `gpu/`: all of it on a GPU. `peers/`: what Shoal is compared with.
`common/`: texts, processes and reports.
"""
