"""Which pool, and so which lane, a request goes to: the rules (`routes.py`), and the files they go
by (`routes_files.py`).
"""
