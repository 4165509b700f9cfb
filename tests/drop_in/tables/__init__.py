"""Every public function of the array API with random arguments, by name."""

from tests.drop_in.tables.indexing import INDEXING
from tests.drop_in.tables.lax import LAX
from tests.drop_in.tables.matrices import MATRICES
from tests.drop_in.tables.models import MODELS
from tests.drop_in.tables.numbers import NUMBERS
from tests.drop_in.tables.random import RANDOM
from tests.drop_in.tables.reductions import REDUCTIONS
from tests.drop_in.tables.shapes import SHAPES
from tests.drop_in.tables.special import SPECIAL

TABLES = (NUMBERS, REDUCTIONS, SHAPES, INDEXING, MATRICES, LAX, MODELS, SPECIAL, RANDOM)
ROWS = {name: row for table in TABLES for name, row in table.items()}

# How many times the usual rounding a function may differ by. An iteration ends when all elements
# have settled, and each shard's have sooner.
TOLERANCE = {"stats.beta.logcdf": 10.0, "stats.beta.logsf": 10.0}
# The same of results of 64 bits that are computed of what has 32.
TOLERANCE_IN_64_BITS = {
    "stats.beta.logcdf": 1e8,
    "stats.beta.logsf": 1e8,
    # A small number is the difference of two larger ones.
    "stats.norm.ppf": 1e8,
}
