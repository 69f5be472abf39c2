"""laya: a choice among the request's labels."""
