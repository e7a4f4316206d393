"""Flow control for any Twisted program: pipelines, windows, memory budgets and concurrency limits."""
