"""`shoal job`: its options (`arguments.py`), its commands (`commands.py`), the run of a job with
its progress (`running.py`), and the list of jobs (`listing.py`).

The engine is `shoal.bulk`; nothing here reads inputs or writes parts.
"""
