"""What Shoal does, as a tutorial: read `test_tutorial.py` from top to bottom."""
