"""Services for operators: the models and the mesh, for `shoal models`, `shoal status` and `shoal
top`. Not on the request path.
"""
