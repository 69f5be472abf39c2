"""The whole mesh on one machine: Redis, a router and workers as child processes, on loopback (DESIGN.md section 12)."""
