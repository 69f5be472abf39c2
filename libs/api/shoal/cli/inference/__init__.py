"""`shoal encode`, `score` and `extract`: their options, the files that they read and write, and the
tables that they print.

Connection options and the report of errors, which all commands share, belong in the folder above.
"""
