"""What runs next, and how long it will take: decisions only, without clock, device or network. The threads that carry them out
are in `jobs/`."""
