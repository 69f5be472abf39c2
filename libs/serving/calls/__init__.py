"""One call through the server: the interceptor, reading and parsing its request, its deadline, and
the status of its error.

Here: what happens between the arrival of a call and its handler, and the limits on that. Not here:
who may call (`security/`), and starting and draining the server (`server.py`)."""
