"""The worker: owns one device, pulls jobs from routers, and answers them. `app.py` wires it up; the
path of a job is in `jobs/`.
"""
