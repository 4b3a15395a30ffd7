"""The training loop and everything around it; `hfgolf.train(...)` calls it (see hfgolf/__init__.py)."""
