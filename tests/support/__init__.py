"""What tests of several folders use: servers as processes, fakes that are named so, waiting without
sleeping.
"""
