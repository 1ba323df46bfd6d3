"""Check the orders of accesses to a layer."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.papers.csp.emulation.spaces import NLP, Kind, Space
from benchmarks.papers.csp.emulation.stream import Rules
from benchmarks.papers.csp.emulation.systems import SYSTEMS, bsp
from benchmarks.papers.csp.figures import SHARED, TABLE_4, accesses, draw_sharing, memory_and_utilisation, parameters


def test_a_layer_that_2_5_and_7_use() -> None:
    """Check table 4 with a layer that the subnets 2, 5 and 7 use.

    CSP reads and writes the layer as if the subnets ran one after another, on any number of stages. The other systems
    do not. In the published order of BSP on 4 stages, 2, 5 and 7 are in three bulks, as with bulks of 3.
    """
    subnets = draw_sharing(2, 5, 7)
    found = {s: accesses(SYSTEMS["CSP"].run(subnets, s, Rules()), SHARED, 0) for s in (1, 2, 4, 8, 16)}
    assert set(found.values()) == {"2F-2B-5F-5B-7F-7B"}
    for stages, bulk in ((4, 3), (8, 8)):
        systems = {"CSP": SYSTEMS["CSP"], "BSP": bsp(bulk), "ASP": SYSTEMS["ASP"]}
        rows = {name: accesses(each.run(subnets, stages, Rules()), SHARED, 0) for name, each in systems.items()}
        assert rows == TABLE_4[stages]
    assert accesses(bsp(4).run(subnets, 4, Rules()), SHARED, 0) == "2F-2B-5F-7F-5B-7B"  # 5 and 7 in one bulk


@pytest.mark.parametrize("stages", [1, 4, 8])
@pytest.mark.parametrize("m", [1, 3])
def test_every_layer_is_accessed_as_one_after_another(stages: int, m: int) -> None:
    subnets = Space("small", 16, 5, NLP).draw(25, 0)
    ran = SYSTEMS["CSP"].run(subnets, stages, Rules(m))
    for block in range(16):
        for choice in range(5):
            users = np.flatnonzero(subnets.choices[:, block] == choice)
            assert accesses(ran, block, choice) == "-".join(f"{y}F-{y}B" for y in users)


def test_a_subnet_reads_from_its_first_forward_on_and_writes_after_its_last_backward() -> None:
    """Check that a subnet reads at its first forward and writes after its last backward.

    The order of stage 0 is F0.0 F0.1 B0.0 F1.0 B0.1 F1.1 B1.0 B1.1.
    """
    subnets = Space("same", 2, 1, (Kind("equal", 1.0, 1.0, 0.0),)).draw(2, 0)
    ran = SYSTEMS["ASP"].run(subnets, 2, Rules(2, overhead=0))
    assert accesses(ran, 0, 0) == "0F-1F-0B-1B"


def test_memory_and_utilisation_of_table_2() -> None:
    """Check table 2.

    In the paper, GPipe holds the whole space, and three contexts hold 3 of the choices of each block.
    """
    whole = {"NLP.c1": 14.8, "NLP.c2": 10.8, "NLP.c3": 5.8, "CV.c1": 7.4, "CV.c2": 3.8, "CV.c3": 1.7}
    choices = {"NLP.c1": 72, "NLP.c2": 48, "NLP.c3": 24, "CV.c1": 48, "CV.c2": 24, "CV.c3": 12}
    for name, billions in whole.items():
        assert parameters(name) == pytest.approx((billions, billions * 3 / choices[name]))
    lines = [line.split() for line in memory_and_utilisation("NLP.c1", 60)]
    assert [(system, int(batch)) for _, system, batch, *_ in lines] == [
        ("CSP", 192),
        ("VPipe", 192),
        ("BSP", 32),
        ("ASP", 16),
    ]
    csp, vpipe, bulks, _ = lines
    assert float(csp[4]) == pytest.approx(float(bulks[4]) * 3 / 72, abs=0.05)  # 3 of 72 choices
    assert float(csp[-1]) > 0.7 > 0.3 > float(vpipe[-1])  # the share of layers found on the device
    # The busy share is from the closed form, and the samples per second are from the paper's times.
    equal_stages = 8 / 15 * 1.13 / 0.54 * 32 / 192
    assert float(bulks[6]) == pytest.approx(equal_stages, rel=0.2)
