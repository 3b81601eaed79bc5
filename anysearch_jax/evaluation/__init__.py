"""Evaluation: metrics, intervals, paired comparison, plots, the report."""
