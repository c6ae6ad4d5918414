"""One module a paper (or a section of one): its rows, tables, claims and figures.

A module has NAME, rows(frame), tables(rows), CLAIMS and FIGURES; a figure's docstring is its caption. What is measured
of real processes is no row of a sweep: `links` and `spd_iterations` are reported by commands of their own.
"""

from commsweep.analysis.papers import adacomp, bias, kfac, local, mst, recipe, rudakov, rudakov_text, unequal

PAPERS = (rudakov, rudakov_text, bias, recipe, unequal, local, adacomp, kfac, mst)
