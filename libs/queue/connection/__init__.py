"""The way to Redis: its URL, TLS and passwords, Sentinels, ACL users, timeouts, and the translation
of its errors.

Here: what is needed to reach a Redis server and to know that it is suitable. Not here: what Shoal
keeps in Redis and the scripts that change it."""
