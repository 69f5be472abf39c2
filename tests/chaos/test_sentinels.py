"""The servers and Sentinels of a run are killed and return to the others."""

from __future__ import annotations

from tests.support.sentinels import SentinelSet


def test_killed_servers_and_sentinels_return_to_the_others() -> None:
    with SentinelSet(replicas=1, is_durable=True) as nodes:
        (master,) = nodes.masters()
        replica = nodes.replica_port(master)
        nodes.kill(nodes.sentinels[0])
        nodes.kill(master)
        nodes.wait_takeover(replica)
        nodes.restore()
        assert nodes.masters() == [replica]
        assert nodes.replica_port(replica) == master
        nodes.order_takeover(master)
        nodes.wait_whole()
        assert nodes.masters() == [master]
