"""Tests of generative models."""
