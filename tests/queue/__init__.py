"""Lanes in a real Redis: order, leases, exactly one answer, recovery, Sentinel."""
