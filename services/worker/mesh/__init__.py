"""What is said to routers and how: messages to and from our types (`codec.py`), connections (`link.py`), Redis' clock
(`clock.py`). It knows no held job and no model in memory."""
