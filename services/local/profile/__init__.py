"""`shoal profile`: where the time of a forward pass and of a request goes. Only its command loads
this.
"""
