"""What the files of a run say: its rows read back, its illnesses, its report."""
