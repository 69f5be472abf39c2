"""The connection to routers: addresses, credentials, channels, RPC methods, and the errors of
failed calls.

This package sends one request to one address, blocking or on an event loop. The contents of a
request and the decision to retry it belong elsewhere.
"""
