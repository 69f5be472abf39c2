"""The connection to Redis: its URL, TLS and passwords, Sentinels, ACL users, timeouts, and the
translation of its errors.

This package reaches a Redis server and checks that it is suitable. Shoal's data in Redis and the
scripts that change it are in `libs/aliases`, `libs/fleet` and `libs/queue`.
"""
