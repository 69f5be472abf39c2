"""Rerankers that are causal language models."""
