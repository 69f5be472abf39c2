"""What happens to a mesh in trouble: too much asked of it, heavy or hostile neighbours, killed
workers, long runs?
"""
