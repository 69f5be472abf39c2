"""The chaos driver: a whole mesh of processes under traffic, and faults from a seed. `make chaos`;
docs/chaos.md.

Order of reading: `plan.py` (which faults, when; pure), `stage.py` (the processes, and the links
between them), `up.py` (one `shoal up` in their place), `proxy.py` and `links.py` (links that can be
cut, slowed and silenced), `machine.py` (clocks and disks that can be wrong), `traffic.py` (clients,
and what became of their requests), `observer.py` (the invariants, read from Redis), `faults.py`
(how each fault is done and undone), `driver.py` (all of it together), `report.py`.
"""
