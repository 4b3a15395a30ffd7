"""The model: its configuration, its modelling file and the way to and from GPT-2.

These files ship to the Hub and must work where only torch and transformers are installed: they import no other part
of hfgolf.
"""
