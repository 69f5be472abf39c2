"""`shoal models`, `status` and `explain`: the commands that inspect and control the mesh, and the
tables that they print.

Connection options and the report of errors, which all commands share, belong in the folder above.
"""
