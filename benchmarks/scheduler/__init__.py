"""How good and how quick are the scheduler's decisions?"""
