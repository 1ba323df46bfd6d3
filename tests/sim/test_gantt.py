"""Check timelines as text."""

from lightning_pipes.sim import simulate
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.generators import uniform


def test_text_gantt():
    plan, costs = uniform(2, 3, f=2, b=4, step=2)
    assert simulate(OneFOneB().program(plan), plan, costs).gantt(52).splitlines() == [
        "26 ns",
        "rank 0 |0---1---........0=======2---1=======....2=======S###| bubble 23.1%",
        "rank 1 |....0---0=======1---1=======2---2=======S###........| bubble 23.1%",
        "        - forward  = backward  # step  . idle",
    ]
