"""Flow control: pipelines, their windows, budgets and turns; useful to any Twisted program."""
