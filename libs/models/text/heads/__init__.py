"""Shared modules that turn an encoder's hidden states into outputs. All compute in float32."""
