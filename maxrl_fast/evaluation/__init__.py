"""Evaluation of a policy's samples: estimates with intervals, tables, a plot and files."""
