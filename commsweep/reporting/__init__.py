"""From rows to verdicts: results, statistics, claims, tables, figures, pages."""
