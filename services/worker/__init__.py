"""The worker: owns one device, pulls jobs from routers, and answers them (`services/worker/intake.py` is where its way begins)."""
