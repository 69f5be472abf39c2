"""Execution of a call: requests in parallel, deadlines, retries, retry budgets, trace spans.

Nothing here knows a verb, which is a `shoal.requests.plan.Plan`, or gRPC, which is behind
`shoal.transport.wire`.
"""
