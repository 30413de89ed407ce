"""Trackers for ``observe.report_to``: Weights & Biases, Trackio and MLflow."""
