"""The worker: owns one device, pulls jobs from routers, and answers them. `app.py` puts it together; a job's way is in `jobs/`."""
