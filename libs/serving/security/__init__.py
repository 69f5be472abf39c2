"""Who calls and which methods they may call: credentials, identities, roles, the audit log, TLS,
and their settings.

The steps of a call are in `calls/`; making certificates is in `services/local/trust`.
"""
