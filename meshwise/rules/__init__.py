"""What each operator means: one factor rule an operator, one file an operator family.

Importing this package fills the registry.
"""

from meshwise.rules import contraction as contraction
from meshwise.rules import elementwise as elementwise
from meshwise.rules import indexing as indexing
from meshwise.rules import random as random
from meshwise.rules import reduction as reduction
from meshwise.rules import shape as shape
from meshwise.rules import updating as updating
