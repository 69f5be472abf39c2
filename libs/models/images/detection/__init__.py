"""Detectors: models that find labelled objects in an image, as boxes in its pixels. Start with
`loading.py`.
"""
