"""What report.py makes of the runs of equal_cost.py: numbers, verdicts on claims, tables and plots."""
