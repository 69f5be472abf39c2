"""The plan of models on workers (`placement.py`, within the capacity that `pool_workers.py`
tracks), and the outcomes of its orders. Pure.
"""
