"""Stage reports: what an experiment's records show, and what they do not.

Matrix in, Markdown and SVG out. Every number printed is read from a record; a gap prints as its status word. Nothing here measures,
judges evidence or needs torch: the same records give the same bytes on any machine.
"""
