"""The aliases of the mesh, in a real Redis."""
