"""Measured figures are figures: every kind has one, and plans can be priced by them."""

from meshwise.cost.hardware import CPU
from meshwise.ir.mesh import refine_mesh
from meshwise.ir.sharding import Sharding
from meshwise.reshard.plan import Reshard
from meshwise.reshard.search import plan_reshard
from meshwise.run.calibrate import Sizes, calibrate


def test_every_kind_is_measured():
    measured = calibrate(sizes=Sizes(small_bytes=1 << 12, large_bytes=1 << 16, repeats=1))
    names = [name for name, _ in measured.byte_factors]
    assert names == [
        "all_gather",
        "minor all_gather",
        "all_to_all",
        "round",
        "reduce_scatter",
        "all_reduce",
        "slice",
    ]
    assert sorted(names) == sorted(name for name, _ in CPU.byte_factors)
    assert all(factor > 0 for _, factor in measured.byte_factors)
    assert measured.link_bytes_per_s > 0
    assert measured.launch_s > 0
    assert measured.round_s is not None
    assert measured.round_s > 0
    mesh = refine_mesh(("x",), (8,))
    source, target = Sharding((mesh.names, ())), Sharding(((), mesh.names))
    plan = plan_reshard(Reshard((64, 64), 4, mesh, source, target, measured))
    assert plan.seconds > 0
