"""One call through the server, from its arrival to its handler: the interceptor, reading and
parsing its request, its deadline and limits, and the status of its error.

Who may call is in `security/`; starting and draining the server is in `server.py`.
"""
