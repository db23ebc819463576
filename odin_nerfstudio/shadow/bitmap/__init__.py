"""Sets of rows as packed bitmaps: 64 rows a word, on any device."""

from odin_nerfstudio.shadow.bitmap.index import Index
from odin_nerfstudio.shadow.bitmap.sets import Bitmap, count_all, count_bits, rows_of, words_of

__all__ = ["Bitmap", "Index", "count_all", "count_bits", "rows_of", "words_of"]
