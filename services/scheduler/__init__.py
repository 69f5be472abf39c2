"""The scheduler places models on workers, and computes how many workers a pool needs. The mesh also
works without it.
"""
