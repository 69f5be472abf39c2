"""`shoal certs` and `shoal redis-acl`: certificates of a development authority, and the Redis users
of a mesh.

Here: what makes credentials. Not here: what checks them (`libs/serving/security`) and the commands
that a Redis user may run (`libs/queue/connection/acl.py`)."""
