"""Batching, fair queueing and time estimates: decisions only, without clock, device or network. The
threads that carry them out are in `jobs/`.
"""
