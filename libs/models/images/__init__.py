"""Image models: decoding and processing on the host (`decoding.py`, `processing.py`), towers as
data with their families, and detectors of regions (`detection/`).
"""
