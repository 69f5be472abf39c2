"""Whole meshes of real processes: Redis, routers, schedulers and workers."""
