"""What is done with a loaded model: LoRA adapters, moves between device and host memory, and how
much memory a batch takes.
"""
