"""The model: its configuration, its modeling code, and conversion to and from GPT-2.

These files ship to the Hub and must run with only torch and transformers installed, so they import nothing else of
hfgolf.
"""
