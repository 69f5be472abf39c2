"""How fast is a mesh at work, and what do its requests, its router and its telemetry cost?"""
