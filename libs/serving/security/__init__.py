"""Who calls and what they may do: credentials, identities, roles, the audit log, and TLS, with the
settings of all of these.

Here: what turns a certificate or token into an identity, and decides which methods it may call. Not
here: the sequence of steps of a call (`calls/`), and making certificates
(`services/local/trust`)."""
