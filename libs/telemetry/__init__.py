"""What is seen of a service from outside: its logs."""
