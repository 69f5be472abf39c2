"""This router's view of the mesh (`view.py`), the speed of its lanes (`throughput.py`), and work
that outlives its call (`background.py`). The package serves no calls.
"""
