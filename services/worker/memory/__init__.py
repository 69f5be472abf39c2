"""Memory management: which models and adapters are on the device, in host memory or loading, and
their sizes. This package loads and evicts; it runs no forward passes and answers no jobs.
"""
