"""A tutorial of Shoal: read `test_tutorial.py` from top to bottom."""
