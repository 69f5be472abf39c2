"""Every family, kind and head against its reference implementation, on random weights."""
