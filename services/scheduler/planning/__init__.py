"""The plan of models on workers (`placement.py`, by the room that `room.py` counts), and what
became of its orders. Pure.
"""
