"""Reports on a run: RunService, report.json, diagnosis."""
