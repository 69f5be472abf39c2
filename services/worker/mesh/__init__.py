"""Communication with routers: conversion between messages and our types (`codec.py`), connections
(`link.py`), Redis' clock (`clock.py`). This package knows no held job and no model in memory."""
