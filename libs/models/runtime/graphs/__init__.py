"""CUDA graphs of small batches: a forward is recorded one time for each bucket of shapes and
replayed with one launch.

`graphs.py` decides and is called by `packed_model.py`; `buckets.py` and `store.py` are its pure
rules; `shapes.py` defines a graph's computation and `buffers.py` its input; `capture.py` is the
interface of the device, `cuda.py` its implementation.
"""
