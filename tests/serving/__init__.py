"""Behaviour of every gRPC server: credentials, limits, health, drain."""
