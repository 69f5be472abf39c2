"""`shoal job`: its options (`arguments.py`), its commands (`commands.py`), and the run of a job
with its progress (`running.py`).

The engine is `shoal.bulk`; nothing here reads inputs or writes parts.
"""
