"""Services for operators: models and the mesh, as `shoal models`, `shoal status` and `shoal top`
show them. Not on the request path."""
