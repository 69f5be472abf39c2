"""Tests, in folders named after what they test; `mesh` runs whole meshes of real processes,
`support` is what several folders use."""
