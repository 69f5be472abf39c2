"""Models of images: decoding and processing on the host (`decoding.py`, `processing.py`), towers as
data and their families, and detectors of regions (`detection/`)."""
