"""What each operator means: one factor rule an operator, one file an operator family.

Importing this package fills the registry.
"""

from meshwise.rules import bordered as bordered
from meshwise.rules import callbacks as callbacks
from meshwise.rules import contraction as contraction
from meshwise.rules import control_flow as control_flow
from meshwise.rules import convolution as convolution
from meshwise.rules import custom_partitioning as custom_partitioning
from meshwise.rules import dynamic_update as dynamic_update
from meshwise.rules import elementwise as elementwise
from meshwise.rules import fourier as fourier
from meshwise.rules import hint as hint
from meshwise.rules import indexing as indexing
from meshwise.rules import largest as largest
from meshwise.rules import like as like
from meshwise.rules import linalg as linalg
from meshwise.rules import manual as manual
from meshwise.rules import marks as marks
from meshwise.rules import pooling as pooling
from meshwise.rules import prefix as prefix
from meshwise.rules import random as random
from meshwise.rules import reduction as reduction
from meshwise.rules import reshaping as reshaping
from meshwise.rules import rolling as rolling
from meshwise.rules import scattering as scattering
from meshwise.rules import setting_rows as setting_rows
from meshwise.rules import shape as shape
from meshwise.rules import shard_alike as shard_alike
from meshwise.rules import slicing as slicing
from meshwise.rules import sorting as sorting
from meshwise.rules.registry import describe_all as describe_all
