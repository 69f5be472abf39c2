"""Order of jobs: tenants by weight, interactive before bulk, bulk never below a tenth."""

from __future__ import annotations

import random
from collections import Counter

from libs.queue import Idle, Lanes, Pulled
from tests.queue.parts import LANE, add, ids, job, lease


async def test_tenants_share_by_weight_behind_a_long_backlog(lanes: Lanes) -> None:
    chance = random.Random(1)
    sizes = [chance.randrange(1, 50) for _ in range(20_000)]
    await add(
        lanes, *(job(f"heavy {number}", size, tenant="heavy") for number, size in enumerate(sizes))
    )
    for _ in range(10):
        await lease(lanes, 400)
    await add(
        lanes,
        *(job(f"light {number}", size, tenant="light") for number, size in enumerate(sizes[:1000])),
    )
    await add(
        lanes,
        *(
            job(f"double {number}", size, tenant="double", weight=2.0)
            for number, size in enumerate(sizes[:1000])
        ),
    )
    got: Counter[str] = Counter()
    while got.total() < 30_000:
        for leased in (await lease(lanes, 400)).jobs:
            got[leased.job_id.split()[0]] += leased.tokens
            fair = {"heavy": got.total() / 4, "light": got.total() / 4, "double": got.total() / 2}
            # At every single job: within the size of one item (1..49 tokens) of the share that the
            # weights give.
            assert all(abs(got[tenant] - share) < 50 for tenant, share in fair.items())


async def test_tenant_that_was_away_gets_no_credit_for_it(lanes: Lanes) -> None:
    await add(lanes, *(job(f"a{number}", tenant="a") for number in range(200)))
    await lease(lanes, 1000)
    await add(lanes, *(job(f"b{number}", tenant="b") for number in range(100)))
    served = Counter(job_id[0] for job_id in ids(await lease(lanes, 1000)))
    assert abs(served["a"] - served["b"]) <= 1


async def exclude_tenants(lanes: Lanes, *tenants: str, tokens: int = 100) -> list[str]:
    found = await lanes.pull(
        LANE, worker_id="w", budget_tokens=tokens, budget_jobs=256, exclude_tenants=tenants
    )
    return ids(found) if isinstance(found, Pulled) else []


async def test_jobs_of_some_tenants_can_be_left(lanes: Lanes) -> None:
    await add(
        lanes,
        *(job(f"a{number}", 30, tenant="a") for number in range(10)),
        job("bulk", tenant="b", priority="bulk"),
    )
    assert await exclude_tenants(lanes, "a") == []
    await add(
        lanes, *(job(f"b{number}", 30, tenant="b") for number in range(4)), job("c", 30, tenant="c")
    )
    assert set(await exclude_tenants(lanes, "a", tokens=60)) == {"b0", "c"}, (
        "in their order, within the budget"
    )
    assert await exclude_tenants(lanes, "a", "b") == []
    assert await exclude_tenants(lanes, "a") == ["b1", "b2", "b3"]
    assert (await lease(lanes, 30)).more
    await add(lanes, job("b4", 10, tenant="b"))
    assert "b4" not in ids(await lease(lanes, 100)), "the device time it was given counts"
    await lanes.cancel(LANE, [job("b4")])
    assert await exclude_tenants(lanes, "a") == []


async def test_others_are_looked_for_among_the_first(lanes: Lanes) -> None:
    await add(lanes, *(job(f"a{number}", 1, tenant="a") for number in range(300)))
    await add(lanes, job("first", 200, tenant="b"), job("second", 200, tenant="b"))
    assert await exclude_tenants(lanes, "a") == ["first"]
    assert await exclude_tenants(lanes, "a") == [], "it has 200 of the others before it"


async def test_interactive_goes_first_and_bulk_fills_up(lanes: Lanes) -> None:
    await add(
        lanes,
        job("b1", priority="bulk"),
        job("b2", priority="bulk"),
        job("i1"),
        job("i2"),
        job("i3"),
    )
    assert ids(await lease(lanes, 40)) == ["i1", "i2", "i3", "b1"]
    assert ids(await lease(lanes, 40)) == ["b2"]


async def test_bulk_never_gets_less_than_a_tenth(lanes: Lanes) -> None:
    await add(lanes, *(job(f"i{number}", 10) for number in range(3000)))
    await add(lanes, *(job(f"b{number}", 70, priority="bulk") for number in range(100)))
    got: Counter[str] = Counter()
    for _ in range(100):
        for leased in (await lease(lanes, 200)).jobs:
            got[leased.job_id[0]] += leased.tokens
        # It saves up for one job (70), and its share of the batch just leased is added after it.
        assert got["b"] >= got.total() / 10 - 70 - 200 / 9
    assert got["b"] <= got.total() / 10 + 70


async def test_bulk_saves_no_more_than_a_batch_or_its_next_job(lanes: Lanes) -> None:
    huge = job("huge", 10_000, priority="bulk")
    await add(lanes, *(job(f"i{number}", 10) for number in range(3000)))
    await add(lanes, huge, *(job(f"b{number}", 10, priority="bulk") for number in range(500)))
    for _ in range(150):
        assert ids(await lease(lanes, 100))[0][0] == "i"
    await lanes.cancel(LANE, [huge])
    leased = [job_id for _ in range(20) for job_id in ids(await lease(lanes, 100))]
    assert len(leased) == 200
    # The credit saved for the huge job (1,667 tokens) is cut to one batch, in addition to the
    # tenth.
    assert 20 <= sum(job_id[0] == "b" for job_id in leased) <= 20 + 2 * 10


async def test_batches_keep_to_their_budgets(lanes: Lanes) -> None:
    await add(lanes, job("huge", 5000), *(job(f"{number}", 10) for number in range(300)))
    first = await lease(lanes, 100)
    assert (ids(first), first.tokens, first.more) == (["huge"], 5000, True)
    second = await lease(lanes, 105)
    assert (len(second.jobs), second.tokens) == (10, 100)
    assert len((await lease(lanes, budget_jobs=7)).jobs) == 7
    last = await lease(lanes, budget_jobs=1000)
    assert (len(last.jobs), last.more) == (283, False)
    assert isinstance(await lanes.pull(LANE, worker_id="w", budget_tokens=1, budget_jobs=1), Idle)
