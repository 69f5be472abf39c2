"""`shoal job`: its options (`arguments.py`), the commands that make a job (`making.py`), the others
(`commands.py`), the run of a job with its progress (`running.py`), submitted jobs (`submitted.py`),
and the list of jobs (`listing.py`).

The engine is `shoal.bulk`; nothing here reads inputs or writes parts.
"""
