"""The whole mesh on one machine: Redis, a router, a scheduler and workers as child processes on
loopback.
"""
