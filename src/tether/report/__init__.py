"""The report of a run: one self-contained page, built from the run folder alone at any time.

In: config.yaml, environment.json, metrics.jsonl, samples.jsonl, ledger.jsonl, result.json.
Out: report.html, which asks nobody for anything. It knows no torch and no model.
"""

from tether.report.build import build_report
from tether.report.headline import headline

__all__ = ["build_report", "headline"]
