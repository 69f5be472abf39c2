"""Linear layers: prepacked (`packed.py`), with int8 weights, and with the low-rank products of LoRA
adapters.
"""
