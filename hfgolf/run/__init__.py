"""What a run leaves in its folder: its files, rows, record and provenance. No torch."""
