"""Tests of `make gpu`, as far as it can be tested without a GPU and without a network."""
