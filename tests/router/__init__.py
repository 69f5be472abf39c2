"""The router: admission control, jobs, pulls, answers; Redis is real, workers are fakes."""
