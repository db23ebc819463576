"""NeRF-XL: one radiance field cut into disjoint tiles, trained jointly and exactly (arXiv 2404.16221)."""
