"""TPU kernels that compute and communicate at once: Pallas, with copies between devices."""

from meshwise.schedule.kernels.blocks import ELEMENTWISE as ELEMENTWISE
from meshwise.schedule.kernels.calling import Interpret as Interpret
from meshwise.schedule.kernels.fused_all_reduce import fused_all_reduce as fused_all_reduce
from meshwise.schedule.kernels.fused_all_reduce import (
    matmul_reduce_scatter as matmul_reduce_scatter,
)
from meshwise.schedule.kernels.gather_matmul import all_gather_matmul as all_gather_matmul
from meshwise.schedule.kernels.planning import MatmulSummand as MatmulSummand
