"""What `make gpu` packs and runs, as far as it can be tested without a GPU and without a
network.
"""
