"""Communication with routers: conversion between messages and internal types (`codec.py`),
connections (`link.py`), and Redis' clock (`clock.py`). This package does not depend on held jobs or
loaded models.
"""
