"""The machine and the person: files, hardware, processes and signals; errors, words and redaction. Knows no config."""
