"""Bidirectional encoders with rotary positions."""
