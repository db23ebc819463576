"""What the report says of its figures: headings, and how to read what stands below them."""

TIMELINE = (
    "Timeline",
    "What each rank did in the last units. Communication costs nothing where it is hidden, that is, behind "
    "computation of the same unit or a neighbouring one. Exposed wait is time in which a rank stands still for other "
    "ranks: it is what the speed-up lacks. Hover over a bar for its numbers, drag to zoom, double-click to see all.",
)
SHARES = (
    "Shares",
    "How units read what their views may see. Early: without waiting, while the unit before was still under way. "
    "Late: still being written by the unit before, so they had to wait for it. Only the policy throughput tells two "
    "more kinds of late ones apart: delayed, read without waiting, as they had been before; and fallback, for which "
    "it had to wait all the same. The more is early, the more communication can be hidden, and the less is waited "
    "for.",
)
RANKS = (
    "Ranks that meet",
    "Primitives on which ranks met, summed over all recorded units. Read after write: views of the row's rank read "
    "what views of the column's rank wrote in the unit before, and may have waited for it. Write after write: views "
    "of both wrote in the same unit. Read before publication: reads of the first kind that did not wait. On the "
    "diagonal a rank meets itself.",
)
GROUPS = (
    "Groups that meet",
    "On which share of its scope each of the last units (row) met each earlier one (column), for the same three "
    "kinds; below each, the share that the plan predicted from the views alone. The cells just left of the diagonal "
    "matter most, since a unit overlaps with the one before it: the darker they are, the more it can read early. "
    "Bright above and dark below: views read more of the scene than the plan knew of. Bright in both: the views see "
    "the same, and the order could not avoid it.",
)
LOAD = (
    "Load",
    "What all ranks sent in a unit, and the primitives and the memory of each rank. Lines that lie close together "
    "mean balanced ranks; the others wait for a rank that has much more than they have.",
)
TILES = (
    "Tiles",
    "How many samples each tile's field was asked for in a step, which share of a step each rank waited for others, "
    "what all ranks sent, and the memory of each rank. The rank with the most samples is the one that the others wait "
    "for.",
)
