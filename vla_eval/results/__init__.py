"""Reading: what a run folder says, as rates, tables, pages and datasets."""
