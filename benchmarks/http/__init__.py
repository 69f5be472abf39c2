"""What does HTTP in front of a mesh cost?"""
