"""Telemetry of a service: logs, metrics and traces."""
