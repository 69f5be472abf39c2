"""Libraries of the services: none imports a service, and which may import which is a rule of
import-linter (pyproject.toml). What one service alone needs belongs into that service."""
