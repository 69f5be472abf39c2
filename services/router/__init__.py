"""The router: takes requests from clients, queues them as jobs, hands jobs to workers and results
back.
"""
