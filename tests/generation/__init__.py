"""Tests of models that write."""
