"""`shoal up`: supervision, devices, wheels in an empty environment."""
