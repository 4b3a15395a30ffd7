"""The model: its configuration and its modeling code.

These files ship to the Hub and must run with only torch and transformers installed, so they import nothing else of
hfgolf.
"""
