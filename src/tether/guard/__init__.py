"""What watches a run: diversity of the answers, gates, alarms and held-out checks.

In flow answers and numbers of the run, out flow measurements and verdicts with their evidence.
A guard never changes weights, rewards or β; it reports, or stops the run.
"""
