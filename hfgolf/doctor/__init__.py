"""Diagnose a run from its metrics, during training or afterwards."""
