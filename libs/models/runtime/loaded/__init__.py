"""Operations on a loaded model: LoRA adapters, moves between device and host memory, and measuring
a batch's memory.
"""
