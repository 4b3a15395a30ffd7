"""The folder of a run: its files, metrics, record and provenance. Does not import torch."""
