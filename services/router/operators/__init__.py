"""Services for operators: models and the mesh, as `shoal models`, `shoal status` and `shoal top` show them. No request passes
through here."""
