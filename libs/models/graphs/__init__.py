"""CUDA graphs of small batches: a forward is recorded once for each bucket of shapes and replayed
with one launch.

`graphs.py` decides and is called by `packed_model.py`; `buckets.py` and `store.py` are its rules,
pure; `shapes.py` says what a graph computes and `buffers.py` what it reads; `capture.py` is the
interface of the device, `cuda.py` its implementation.
"""
