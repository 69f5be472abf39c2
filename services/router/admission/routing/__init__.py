"""Choose the pool, and so the lane, of a request: the rules (`routes.py`) and their files
(`routes_files.py`).
"""
