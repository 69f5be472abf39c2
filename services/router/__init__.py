"""The router queues clients' requests as jobs, hands jobs to workers, and returns the results."""
