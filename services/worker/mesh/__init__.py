"""Communication with routers: conversion of jobs (`job_codec.py`) and of results (`codec.py`),
connections (`link.py`), and Redis' clock (`clock.py`). This package does not depend on held jobs or
loaded models.
"""
