"""Linear layers: prepacked (`packed.py`), of weights in int8, and with the low-rank products of
LoRA adapters.
"""
