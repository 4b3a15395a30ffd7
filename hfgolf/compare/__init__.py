"""Compare several runs: experiments, their statistics, tables and plots."""
