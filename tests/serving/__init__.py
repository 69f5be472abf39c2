"""What every gRPC server does: credentials, limits, health, drain."""
