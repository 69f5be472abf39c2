"""Run packed batches: backbones, CUDA graphs, adapters, memory tiers and precision."""
