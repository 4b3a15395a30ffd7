"""What a run suffers from, read from its rows while it trains or afterwards."""
