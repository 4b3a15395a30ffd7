"""What several runs say together: experiments, their statistics, tables and plots."""
