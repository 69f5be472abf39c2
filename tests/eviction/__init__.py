"""Tests of the choice of the model to evict."""
