"""Traces, metrics and logs, seen from outside."""
