"""The connection to routers: addresses, credentials, channels, RPC methods, and the errors of
failed calls.

Sends one request to one address, blocking or on an event loop. What a request says, and whether it
is retried, belongs elsewhere.
"""
