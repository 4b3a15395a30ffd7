"""The report of a run: charts, tables and the page that shows them."""
