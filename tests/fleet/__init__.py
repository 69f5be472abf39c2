"""The registry of workers, claims, orders and the leader's lock, in a real Redis."""
