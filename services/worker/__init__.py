"""The worker: owns one device, pulls jobs from routers, and answers them. `app.py` wires it up;
`jobs/` has the path of a job.
"""
