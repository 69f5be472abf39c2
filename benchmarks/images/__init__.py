"""Benchmarks of images and pages. `python -m benchmarks.images`, or `make bench-images`: preparing
(`encoders.py`), forwards of encoders (`encoders.py`) and of the towers of vision-language models
(`pages.py`) against transformers, and the mesh (`mesh.py`).
"""
