"""Detectors: models that find what labels name in an image, as boxes in its pixels. `loading.py` is
where to begin.
"""
