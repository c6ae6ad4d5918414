"""One module a paper (or a section of one): its rows, tables, claims and figures.

A module has NAME, rows(frame), tables(rows), CLAIMS and FIGURES; a figure's docstring is its caption.
"""

from commsweep.analysis.papers import adacomp, kfac, rudakov, rudakov_text

PAPERS = (rudakov, rudakov_text, adacomp, kfac)
