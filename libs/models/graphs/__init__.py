"""CUDA graphs of small batches: an encoder's forward is recorded once for each bucket of shapes and replayed with one launch.

`graphs.py` decides and is called by `packed_model.py`; `buckets.py` and `store.py` are its rules, pure; `buffers.py` is what a
graph reads; `capture.py` is the interface of the device, `cuda.py` its implementation.
"""
